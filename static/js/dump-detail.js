// One dump, or two compared: module tree at left, statistics or differences at right.
//
// GET /api/dumps/ID -> {dump: as in dumps.js, left_out, points: [{path, kind, rank, step, rid, start, stop, epoch, key,
//   shape: [n], dtype, min, max, mean, std, l2, nan, inf, histogram: {low, high, counts: [n]} or null, hash, has_data,
//   url}]}  in execution order
// GET /api/dumps/compare?a&b -> {a, b: dumps, first: index or null, points: [{path, kind, rank, step, shape, max_abs,
//   max_rel, cosine, equal, diverges, note, only_in: "" | "a" | "b"}], label: sentence, problems: [sentence]}

import { get } from "./api.js";
import { fill, fromTemplate, h, setData } from "./dom.js";
import { collapsed, statistic, treeOf } from "./dump-tree.js";
import { bytes, count, plural, stepName, when } from "./format.js";
import { histogram } from "./histogram.js";
import { jobsFeed } from "./jobs-feed.js";
import { showPin, startRecordingActions } from "./recording-actions.js";
import { stateInWords, toneOf } from "./recording-words.js";
import { setFacts } from "./sheet.js";
import { openTensor } from "./tensor-sheet.js";

const ROWS = 300; // drawn at once: each has a histogram
const page = document.getElementById("dump");
let limit = ROWS;
let dump = null; // the one that is shown, not two compared
let points = [];
let first = null;
let chosenPath = "";

function statisticsRow(point) {
  const row = fromTemplate("point-row");
  fill(row, {
    path: point.path, kind: point.kind, rank: point.rank, step: point.step, shape: point.shape.join(" × "), dtype: point.dtype, min: statistic(point.min), max: statistic(point.max),
    mean: statistic(point.mean), std: statistic(point.std), bad: point.nan + point.inf ? `${count(point.nan)} NaN, ${count(point.inf)} Inf` : "",
  });
  if (point.histogram) row.querySelector("[data-histogram]").append(histogram(point.histogram));
  const link = row.querySelector("a");
  link.hidden = !point.has_data;
  if (point.has_data) link.href = point.url;
  link.addEventListener("click", (event) => event.stopPropagation());
  row.addEventListener("click", () => openTensor(dump.id, point));
  return row;
}

function verdictOf(point, index) {
  if (point.only_in) return `only in ${point.only_in.toUpperCase()}`;
  if (index === first) return "first to differ";
  return point.equal ? "equal" : point.diverges ? "differs" : point.note || "within tolerance";
}

function differenceRow(point, index) {
  const row = fromTemplate("difference-row");
  row.classList.toggle("first-difference", index === first);
  fill(row, {
    path: point.path, kind: point.kind, rank: point.rank, step: point.step, shape: point.shape.join(" × "), abs: statistic(point.max_abs), rel: statistic(point.max_rel), cosine: statistic(point.cosine),
    verdict: verdictOf(point, index),
  });
  return row;
}

function draw() {
  const makeRow = page.dataset.compare ? differenceRow : statisticsRow;
  const chosen = points.map((point, index) => ({ point, index })).filter(({ point: { path } }) => path === chosenPath || !chosenPath || path.startsWith(`${chosenPath}.`));
  const shown = chosen.slice(0, limit).map(({ point, index }) => makeRow(point, index));
  page.querySelector("#points tbody").replaceChildren(...shown);
  page.querySelector(".more").hidden = chosen.length <= limit;
  page.querySelector("#points").hidden = !shown.length;
  document.getElementById("no-points").hidden = shown.length > 0;
  fill(page, { shown: `${count(shown.length)} of ${count(points.length)}` });
}

page.querySelector(".more").addEventListener("click", () => {
  limit += ROWS;
  draw();
});

function treeNode(node, depth = 0) {
  const pick = h("button", { type: "button", class: "tree-name", onclick: () => choose(node.path) }, node.name);
  pick.dataset.path = node.path;
  if (!node.children.length) return h("li", {}, pick);
  return h("li", {}, h("details", { open: depth === 0 }, h("summary", {}, pick), h("ul", {}, ...node.children.map((child) => treeNode(child, depth + 1)))));
}

function choose(path) {
  chosenPath = path === chosenPath ? "" : path;
  limit = Math.max(ROWS, (first ?? 0) + ROWS);
  for (const pick of page.querySelectorAll(".tree-name")) pick.setAttribute("aria-pressed", String(pick.dataset.path === chosenPath));
  draw();
}

function sayCompared(found) {
  const headline = first !== null ? `First differs at ${points[first].path}, ${points[first].kind}` : points.length ? "The two dumps agree" : "The two dumps have nothing in common";
  fill(page, { headline, detail: found.label, nothing: "No point of one is a point of the other." });
  warn(found.problems.join("; "));
  const go = page.querySelector("[data-do=first]");
  go.hidden = first === null;
  go.addEventListener("click", () => {
    choose("");
    const row = page.querySelector(".first-difference");
    row.scrollIntoView({ block: "center" });
    row.focus({ preventScroll: true });
  });
}

/** Columns that say the same in every row are said once, above the table. */
function sayOnce() {
  const values = { rank: (point) => point.rank, step: (point) => point.step, dtype: (point) => point.dtype, bad: (point) => point.nan + point.inf };
  const one = Object.keys(values).filter((name) => new Set(points.map(values[name])).size === 1);
  page.querySelector("#points").dataset.one = one.filter((name) => name !== "bad" || !values.bad(points[0])).join(" ");
  return { rank: one.includes("rank") ? points[0].rank : null, step: one.includes("step") ? points[0].step : null, dtype: one.includes("dtype") ? points[0].dtype : null };
}

function sayOne(found) {
  dump = found.dump;
  const { rank, step, dtype } = sayOnce();
  showPin(document.getElementById("recording-actions"), dump);
  setData(page.querySelector(".job-state .dot"), "tone", toneOf(dump.state));
  fill(page, { headline: stateInWords(dump), nothing: dump.state === "capturing" ? "It is armed and waits for a step that it wants." : "No wanted step ran while it was armed." });
  setFacts(page.querySelector("dl.facts"), [
    ["Requests", dump.rids.join(", ") || "every request"], ["Ran as", dump.form], ["Weights", stepName(dump.token_step, dump.epoch)], ["Tensors", dtype ? `${count(dump.tensors)}, ${dtype}` : count(dump.tensors)], ["Rank", rank], ["Step", step], ["Size", bytes(dump.bytes)],
    ["Armed", when(dump.created_at)], ["By", dump.actor], ["Note", dump.note],
  ]);
  const left = found.left_out ? `${plural(found.left_out, "tensor")} more are in the files.` : "";
  warn([dump.expired ? "Its files made room for others in the disk quota. A pin keeps them." : "", ["partial", "failed"].includes(dump.state) ? dump.message : "", left].filter(Boolean).join(" "));
}

function warn(text) {
  document.getElementById("dump-warning").hidden = !text;
  fill(page, { warning: text });
}

async function load() {
  const problem = document.getElementById("dump-problem");
  try {
    const found = await get(page.dataset.url);
    points = found.points;
    first = found.first ?? null;
    limit = Math.max(limit, (first ?? 0) + ROWS);
    page.querySelector(".loaded").hidden = false;
    page.querySelector(".tree").replaceChildren(...collapsed(treeOf(points)).map((node) => treeNode(node)));
    if (page.dataset.compare) sayCompared(found);
    else sayOne(found);
    draw();
  } catch (error) {
    problem.hidden = false;
    fill(problem, { text: error.message });
  }
  page.querySelector(".loading").hidden = true;
}

if (!page.dataset.compare) {
  jobsFeed.watch();
  jobsFeed.addEventListener("job", ({ detail: job }) => ["dump", "stop_dump"].includes(job.kind) && dump?.state === "capturing" && load());
  startRecordingActions(() => dump, "dump", (changed) => {
    dump = { ...dump, ...changed };
    showPin(document.getElementById("recording-actions"), dump);
  });
}
load();
