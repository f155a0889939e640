// Where an answer is made: automatic, a worker, a rank, or several side by side.

import { fromTemplate, fill, setData } from "./dom.js";
import { feed } from "./feed.js";
import { byId, toneOf } from "./fleet-state.js";
import { plural } from "./format.js";

const STORE_KEY = "qd.route";
const MAX_COLUMNS = 4;

/** Choices out of a snapshot: [{route, label, note, tone}]; "auto" is always the first. */
function choicesOf(snapshot) {
  const workers = byId((snapshot?.workers ?? []).filter((worker) => worker.kind === "web"));
  const ranks = (snapshot?.ranks ?? []).filter((rank) => rank.tp === 0);
  return [
    { route: "auto", label: "Automatic", note: "least loaded", tone: null },
    ...workers.map((worker) => ({ route: `worker:${worker.id}`, label: `Worker ${worker.id}`, note: plural(worker.streams, "stream"), tone: toneOf(worker.state) })),
    ...ranks.map((rank) => ({ route: `rank:${rank.dp}`, label: `Rank dp${rank.dp}`, note: `${rank.running} running`, tone: toneOf(rank.state) })),
  ];
}

/** "worker:2" -> "worker 2", "rank:1" -> "dp1". */
export function routeName(route) {
  const [kind, id] = route.split(":");
  return { worker: `worker ${id}`, rank: `dp${id}` }[kind] ?? "automatic";
}

export class RoutePicker {
  constructor(box, preset) {
    this.box = box;
    this.list = box.querySelector(".route-list");
    this.rows = new Map();
    const kept = read();
    this.compare = preset ? false : kept.compare;
    this.chosen = new Set(preset ? [preset] : kept.chosen);
    for (const button of box.querySelectorAll("[data-compare]")) {
      button.addEventListener("click", () => this.setCompare(button.dataset.compare === "yes"));
    }
    this.list.addEventListener("change", () => this._changed());
    feed.addEventListener("change", () => this.draw());
    this.draw();
  }

  /** Routes to send to: one, or several when side by side. */
  routes() {
    const live = [...this.chosen].filter((route) => this.rows.has(route));
    if (this.compare) return live.filter((route) => route !== "auto").slice(0, MAX_COLUMNS);
    return [live[0] ?? "auto"];
  }

  setCompare(compare) {
    this.compare = compare;
    if (compare) {
      const all = [...this.rows.keys()].filter((route) => route !== "auto");
      const ranks = all.filter((route) => route.startsWith("rank:"));
      this.chosen = new Set((ranks.length > 1 ? ranks : all).slice(0, MAX_COLUMNS));
    } else this.chosen = new Set([[...this.chosen][0] ?? "auto"]);
    this.draw();
    this._keep();
  }

  draw() {
    const choices = choicesOf(feed.snapshot);
    const known = new Set(choices.map(({ route }) => route));
    for (const [route, row] of this.rows) if (!known.has(route)) { row.remove(); this.rows.delete(route); }
    for (const choice of choices) this._drawChoice(choice);
    for (const button of this.box.querySelectorAll("[data-compare]")) {
      button.setAttribute("aria-pressed", String((button.dataset.compare === "yes") === this.compare));
    }
  }

  _drawChoice({ route, label, note, tone }) {
    let row = this.rows.get(route);
    if (!row) {
      row = fromTemplate("route-row");
      row.querySelector("input").value = route;
      this.rows.set(route, row);
      this.list.append(row);
    }
    const input = row.querySelector("input");
    input.type = this.compare ? "checkbox" : "radio";
    input.checked = this.chosen.has(route);
    row.hidden = this.compare && route === "auto";
    const dot = row.querySelector(".dot");
    dot.hidden = tone === null || tone === "ok";
    setData(dot, "tone", tone);
    fill(row, { label, note });
  }

  _changed() {
    const inputs = [...this.list.querySelectorAll("input:checked")];
    this.chosen = new Set(inputs.map((input) => input.value));
    this._keep();
  }

  _keep() {
    localStorage.setItem(STORE_KEY, JSON.stringify({ compare: this.compare, chosen: [...this.chosen] }));
  }
}

function read() {
  try {
    return { compare: false, chosen: ["auto"], ...JSON.parse(localStorage.getItem(STORE_KEY)) };
  } catch {
    return { compare: false, chosen: ["auto"] };
  }
}
