// One tensor of a dump in the side sheet: facts, histogram, heat map, first values.
//
// GET /api/dumps/ID/view?key=RANK:KEY -> {record, folded, block, heat, values: [number or null]}

import "./heat-map.js";
import { get } from "./api.js";
import { h, icon } from "./dom.js";
import { statistic } from "./dump-tree.js";
import { count } from "./format.js";
import { histogram } from "./histogram.js";
import { facts, openSheet } from "./sheet.js";

function factsOf(point) {
  return facts([
    ["Kind", point.kind], ["Rank", point.rank], ["Request", point.rid && h("code", {}, point.rid)],
    ["Positions", point.rid ? `${point.start} to ${point.stop - 1}` : null], ["Step", point.step], ["Epoch", point.epoch],
    ["Shape", `${point.shape.join(" × ") || "one value"}, ${point.dtype}`], ["Mean, std", `${statistic(point.mean)}, ${statistic(point.std)}`],
    ["Min, max", `${statistic(point.min)}, ${statistic(point.max)}`], ["L2", statistic(point.l2)], ["Not finite", point.nan + point.inf ? `${count(point.nan)} NaN, ${count(point.inf)} Inf` : null],
    ["SHA-256", h("code", {}, point.hash)],
  ]);
}

function notice(text, tone) {
  return h("div", { class: "notice", role: tone === "bad" ? "alert" : "note", data: { tone } }, icon(tone), h("p", {}, text));
}

function valuesOf(values, total) {
  const text = values.map((value) => statistic(value)).join("  ");
  return h("details", {}, h("summary", { class: "small dim" }, `The first ${count(values.length)} of ${count(total)} values`), h("pre", { class: "values", tabIndex: 0 }, text));
}

/** Opens the sheet at once; the map follows when the server has read the tensor. */
export async function openTensor(dumpId, point) {
  const map = h("section", {}, h("h3", {}, "Heat map"));
  const parts = [factsOf(point)];
  if (point.histogram) parts.push(h("section", {}, h("h3", {}, "Histogram"), histogram(point.histogram), h("div", { class: "heat-ends small dim" }, h("span", {}, statistic(point.histogram.low)), h("span", {}, "counts, logarithmic"), h("span", {}, statistic(point.histogram.high)))));
  openSheet(point.path, [...parts, map], point.has_data ? [h("a", { class: "button", href: point.url, download: true }, icon("download"), "Download its file")] : []);
  if (!point.has_data) {
    map.append(notice("Its bytes were not kept: they gave way to newer ones, or the dump has not written them. The statistics stay.", "info"));
    return;
  }
  map.append(h("span", { class: "skeleton" }));
  try {
    const view = await get(`/api/dumps/${encodeURIComponent(dumpId)}/view?key=${encodeURIComponent(point.key)}`);
    const heat = h("qd-heat");
    map.replaceChildren(map.firstElementChild, heat);
    heat.show(view);
    map.after(valuesOf(view.values, view.folded[0] * view.folded[1]));
  } catch (error) {
    map.replaceChildren(map.firstElementChild, notice(`It cannot be shown: ${error.message}`, "bad"));
  }
}
