// Two profiles side by side: measures in all, then each operation per recorded step, the largest change first.
//
// GET /api/profiles/compare?a&b -> {a, b: as in profiles.js, problems: [sentence], stages: [{stage, before_us, after_us}],
//   ops: [{name, cat, communication, before_us, after_us, change_us, before_calls, after_calls}], left_out,
//   busy_share, communication_share, median_step_us, largest_gap_us: [before, after]}

import { get } from "./api.js";
import { fill, h, setData } from "./dom.js";
import { count, percent, rate } from "./format.js";
import { micros } from "./lane-math.js";
import { ratioInWords, signed } from "./recording-words.js";

const page = document.getElementById("compared");
const filter = document.getElementById("op-filter");
let found = null;

const time = (us) => (us === null ? "–" : micros(us));
const points = (share) => `${(100 * share).toFixed(1)} points`;

function total(name, before, after, words, change) {
  const worse = after > before ? "slower" : after < before ? "faster" : "";
  return h("tr", {}, h("td", {}, name), h("td", { class: "num" }, words(before)), h("td", { class: "num" }, words(after)), h("td", { class: `num ${change.neutral ? "" : worse}` }, change.text));
}

function timeRow(name, before, after) {
  const both = before !== null && after !== null;
  return total(name, before, after, time, { text: both ? `${signed(after - before, micros)} (${ratioInWords(before, after)})` : "–", neutral: !both });
}

function shareRow(name, [before, after]) {
  return total(name, before, after, percent, { text: signed(after - before, points), neutral: true });
}

function drawTotals() {
  for (const side of ["a", "b"]) {
    const link = page.querySelector(`[data-${side}]`);
    link.textContent = found[side].id;
    link.href = `/profiles/${found[side].id}/`;
  }
  page.querySelector("#totals tbody").replaceChildren(
    ...found.stages.map(({ stage, before_us: before, after_us: after }) => timeRow(`Median ${stage} step, recorded`, before, after)),
    timeRow("Median decode step around the capture", ...found.median_step_us),
    timeRow("Largest token gap", ...found.largest_gap_us),
    shareRow("Busy", found.busy_share),
    shareRow("Communication", found.communication_share),
  );
}

function bar(change, most) {
  const mark = h("span", { class: "change-bar", "aria-hidden": true }, h("span"));
  setData(mark, "side", change > 0 ? "slower" : "faster");
  mark.firstElementChild.style.width = `${most ? (50 * Math.abs(change)) / most : 0}%`;
  return mark;
}

function drawOps() {
  const words = filter.value.trim().toLowerCase();
  const shown = found.ops.filter(({ name }) => name.toLowerCase().includes(words));
  const most = Math.max(0, ...found.ops.map(({ change_us: change }) => Math.abs(change)));
  page.querySelector("#changes tbody").replaceChildren(...shown.map((op) => h("tr", {},
    h("td", { class: "mono cut source", title: op.name }, op.name, op.communication ? h("span", { class: "chip" }, "communication") : null),
    h("td", { class: "num" }, op.before_calls ? micros(op.before_us) : "–"), h("td", { class: "num" }, op.after_calls ? micros(op.after_us) : "–"),
    h("td", { class: `num ${op.change_us > 0 ? "slower" : "faster"}` }, op.before_calls && op.after_calls ? signed(op.change_us, micros) : op.after_calls ? `new, ${signed(op.change_us, micros)}` : `gone, ${signed(op.change_us, micros)}`),
    h("td", {}, bar(op.change_us, most)), h("td", { class: "num" }, rate(op.before_calls)), h("td", { class: "num" }, rate(op.after_calls)))));
  page.querySelector("#changes").hidden = !shown.length;
  document.getElementById("no-changes").hidden = shown.length > 0;
  fill(page, { shown: `${count(shown.length)} of ${count(found.ops.length)}${found.left_out ? `, ${count(found.left_out)} smaller ones left out` : ""}` });
}

function say() {
  const [stage] = found.stages.filter((one) => one.stage === "decode").concat(found.stages);
  const [before, after] = stage ? [stage.before_us, stage.after_us] : found.median_step_us;
  const ratio = ratioInWords(before, after);
  const headline = ratio === "–" ? "No step in common" : ratio === "±0" ? "As fast as before" : `${after > before ? "Slower" : "Faster"}: ${ratio} a ${stage?.stage ?? "decode"} step`;
  const sum = found.ops.reduce((all, op) => all + op.change_us, 0);
  fill(page, { headline, detail: `Operations took ${signed(sum, micros)} a step in sum; the largest change is ${found.ops[0] ? `${found.ops[0].name}, ${signed(found.ops[0].change_us, micros)}` : "none"}.`, problems: found.problems.join("; ") });
  document.getElementById("unlike").hidden = !found.problems.length;
}

async function load() {
  const problem = document.getElementById("compare-problem");
  try {
    found = await get(page.dataset.url);
    page.querySelector(".loaded").hidden = false;
    say();
    drawTotals();
    drawOps();
  } catch (error) {
    problem.hidden = false;
    fill(problem, { text: `The two cannot be compared: ${error.message}` });
  }
  page.querySelector(".loading").hidden = true;
}

filter.addEventListener("input", drawOps);
load();
