// One dump, or two compared: module tree at left, statistics or differences at right.
//
// GET /api/dumps/ID -> {dump: as in dumps.js, points: [{path, kind, rank, step, shape: [n], dtype, min, max, mean, std, l2,
//   nan, inf, histogram: {low, high, counts: [n]} or null, hash, has_data, url}]}  in execution order
// GET /api/dumps/compare?a&b -> {a, b: dumps, first: index or null, points: [{path, kind, rank, step, shape, max_abs,
//   max_rel, cosine, equal, diverges, note, only_in: "" | "a" | "b"}], label: sentence}

import { get } from "./api.js";
import { fill, fromTemplate, h } from "./dom.js";
import { collapsed, statistic, treeOf } from "./dump-tree.js";
import { count } from "./format.js";

const page = document.getElementById("dump");
const SVG = "http://www.w3.org/2000/svg";
let points = [];
let first = null;
let chosenPath = "";

function histogram({ low, high, counts }) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${counts.length} 24`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", "histogram");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `Histogram from ${statistic(low)} to ${statistic(high)}`);
  const top = Math.max(1, ...counts.map((value) => Math.log1p(value)));
  counts.forEach((value, index) => {
    const bar = document.createElementNS(SVG, "rect");
    const tall = (22 * Math.log1p(value)) / top;
    for (const [name, size] of Object.entries({ x: index, y: 24 - tall, width: 0.9, height: tall })) bar.setAttribute(name, size);
    svg.append(bar);
  });
  return svg;
}

function statisticsRow(point) {
  const row = fromTemplate("point-row");
  fill(row, {
    path: point.path, kind: point.kind, rank: point.rank, step: point.step, shape: point.shape.join(" × "), dtype: point.dtype, min: statistic(point.min), max: statistic(point.max),
    mean: statistic(point.mean), std: statistic(point.std), l2: statistic(point.l2), bad: point.nan + point.inf ? `${count(point.nan)} NaN, ${count(point.inf)} Inf` : "",
  });
  if (point.histogram) row.querySelector("[data-histogram]").append(histogram(point.histogram));
  const link = row.querySelector("a");
  link.hidden = !point.has_data;
  if (point.has_data) link.href = point.url;
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
  const shown = points.flatMap((point, index) => (point.path === chosenPath || !chosenPath || point.path.startsWith(`${chosenPath}.`) ? [makeRow(point, index)] : []));
  page.querySelector("#points tbody").replaceChildren(...shown);
  fill(page, { shown: `${count(shown.length)} of ${count(points.length)}` });
}

function treeNode(node) {
  const pick = h("button", { type: "button", class: "tree-name", onclick: () => choose(node.path) }, node.name);
  pick.dataset.path = node.path;
  if (!node.children.length) return h("li", {}, pick);
  return h("li", {}, h("details", { open: node.path.split(".").length < 2 }, h("summary", {}, pick), h("ul", {}, ...node.children.map(treeNode))));
}

function choose(path) {
  chosenPath = path === chosenPath ? "" : path;
  for (const pick of page.querySelectorAll(".tree-name")) pick.setAttribute("aria-pressed", String(pick.dataset.path === chosenPath));
  draw();
}

function say(found) {
  if (!page.dataset.compare) {
    fill(page, { headline: `${found.dump.state}: ${found.dump.rids.join(", ")}`, detail: `${count(points.length)} tensors, ran as ${found.dump.form}` });
    return;
  }
  const headline = first !== null ? `First differs at ${points[first].path}, ${points[first].kind}` : points.length ? "The two dumps agree" : "The two dumps have nothing in common";
  fill(page, { headline, detail: found.label });
}

async function load() {
  const problem = document.getElementById("dump-problem");
  try {
    const found = await get(page.dataset.url);
    points = found.points;
    first = found.first ?? null;
    page.querySelector(".loaded").hidden = false;
    page.querySelector(".tree").replaceChildren(...collapsed(treeOf(points)).map(treeNode));
    say(found);
    draw();
    page.querySelector(".first-difference")?.scrollIntoView({ block: "center" });
  } catch (error) {
    problem.hidden = false;
    fill(problem, { text: error.message });
  }
}

load();
