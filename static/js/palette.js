// Ctrl-K: pages, conversations and the page's own commands in one list.

import { h, icon } from "./dom.js";

const sources = [];

/** Adds commands: `source(query)` gives (a promise of) [{label, kind, icon, run}]. */
export function addCommands(source) {
  sources.push(source);
}

/** Places where the letters of `query` occur in order rank by how early and how close they are. */
function matchScore(label, query) {
  const text = label.toLowerCase();
  let score = 0;
  let at = -1;
  for (const letter of query.toLowerCase()) {
    const next = text.indexOf(letter, at + 1);
    if (next < 0) return -1;
    score += next === at + 1 ? 0 : next - at;
    at = next;
  }
  return score;
}

function pages() {
  return [...document.querySelectorAll(".nav a")].map((link) => ({
    label: link.title, kind: "Page", icon: link.querySelector("use").getAttribute("href").split("#")[1],
    run: () => { location.href = link.href; },
  }));
}

class Palette {
  constructor(dialog) {
    this.dialog = dialog;
    this.input = dialog.querySelector("input");
    this.list = dialog.querySelector("ul");
    this.none = dialog.querySelector(".none");
    this.shown = [];
    this.at = 0;
    this.input.addEventListener("input", () => this.search());
    dialog.addEventListener("keydown", (event) => this.onKey(event));
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  }

  open() {
    if (this.dialog.open) return;
    this.input.value = "";
    this.dialog.showModal();
    this.search();
  }

  async search() {
    const query = this.input.value.trim();
    const found = (await Promise.all(sources.map((source) => source(query)))).flat();
    if (query !== this.input.value.trim()) return;
    this.shown = found
      .map((command) => ({ command, score: matchScore(command.label, query) }))
      .filter(({ score }) => score >= 0)
      .sort((a, b) => (query ? a.score - b.score : 0))
      .slice(0, 50)
      .map(({ command }) => command);
    this.at = 0;
    this.draw();
  }

  draw() {
    this.none.hidden = this.shown.length > 0;
    this.list.replaceChildren(...this.shown.map((command, index) => h("li",
      { id: `command-${index}`, role: "option", "aria-selected": String(index === this.at), onclick: () => this.run(index) },
      icon(command.icon), h("span", { class: "cut" }, command.label), h("span", { class: "kind" }, command.kind))));
    this.input.setAttribute("aria-activedescendant", `command-${this.at}`);
    this.list.children[this.at]?.scrollIntoView({ block: "nearest" });
  }

  onKey(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && this.shown.length) {
      this.at = (this.at + step + this.shown.length) % this.shown.length;
      this.draw();
    } else if (event.key === "Enter") this.run(this.at);
    else return;
    event.preventDefault();
  }

  run(index) {
    const command = this.shown[index];
    if (!command) return;
    this.dialog.close();
    command.run();
  }
}

/** Wires Ctrl-K, the button and the pages. */
export function startPalette() {
  const palette = new Palette(document.getElementById("palette"));
  addCommands(pages);
  document.getElementById("open-palette").addEventListener("click", () => palette.open());
  document.addEventListener("keydown", (event) => {
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
      event.preventDefault();
      palette.open();
    }
  });
}
