// One profile: ranks, summary, lanes, files.
//
// GET /api/profiles/ID -> {profile: as in profiles.js plus {reason, ranks: [{dp, tp, state, message, events (null while it records), bytes,
//   offset_us, uncertainty_us}], files: [{name, bytes, url}], viewer_url, clock_method},
//   summary: null or {top_ops: [{name, count, total_us, share}], ranks: [{name, busy, communication, idle, straggler_us}]}}

import "./lanes.js";
import { startActions } from "./action-sheet.js";
import { get } from "./api.js";
import { fill, h, setData } from "./dom.js";
import { bytes, count, percent, plural, when } from "./format.js";
import { jobTone, jobsFeed } from "./jobs-feed.js";
import { micros } from "./lane-math.js";
import { showPin, startRecordingActions } from "./recording-actions.js";
import { ranksInWords, stateInWords, toneOf } from "./recording-words.js";
import { setFacts } from "./sheet.js";

const page = document.getElementById("profile");
const id = page.dataset.profile;
const CAPTURING_MS = 1000; // between two looks at what the ranks have written
let shown = null;
let again = 0;

function body(name) {
  return page.querySelector(`#${name} tbody`);
}

function cell(text, kind = "") {
  return h("td", { class: kind }, text);
}

function drawRanks(ranks) {
  body("profile-ranks").replaceChildren(...ranks.map((rank) => {
    const state = h("span", { class: "state" }, h("span", { class: "dot" }), rank.state);
    setData(state.firstChild, "tone", jobTone(rank.state));
    const clock = rank.offset_us === null ? "not aligned" : `${micros(Math.abs(rank.offset_us))} ± ${micros(rank.uncertainty_us)}`;
    return h("tr", {}, cell(`dp${rank.dp} · tp${rank.tp}`), h("td", {}, state), cell(rank.events === null ? "–" : count(rank.events), "num"), cell(bytes(rank.bytes), "num"), cell(clock, "num"), cell(rank.message, "dim"));
  }));
}

function drawSummary(summary) {
  page.querySelector("[data-summary]").hidden = !summary;
  if (!summary) return;
  body("top-ops").replaceChildren(...summary.top_ops.map((op) => {
    const meter = h("span", { class: "meter" }, h("span"));
    meter.firstChild.style.width = `${100 * op.share}%`;
    return h("tr", {}, cell(op.name, "mono cut source"), h("td", { class: "progress" }, meter, h("span", { class: "small dim" }, percent(op.share))), cell(micros(op.total_us), "num"), cell(count(op.count), "num"));
  }));
  body("busy").replaceChildren(...summary.ranks.map((rank) => h("tr", {}, cell(rank.name), cell(percent(rank.busy), "num"), cell(percent(rank.communication), "num"), cell(percent(rank.idle), "num"),
    cell(rank.straggler_us > 0 ? `${micros(rank.straggler_us)} behind` : "–", "num"))));
}

/** What the merge made comes first; the ranks' own files are many. */
function drawFiles(files) {
  const lines = (some) => some.map((file) => h("li", {}, h("a", { href: file.url, download: true }, file.name), " ", h("span", { class: "faint" }, bytes(file.bytes))));
  const merged = files.filter(({ name }) => /^(merged|summary)-/.test(name));
  const parts = files.filter((file) => !merged.includes(file));
  page.querySelector("[data-files]").replaceChildren(...lines(merged));
  page.querySelector("[data-parts]").replaceChildren(...lines(parts));
  page.querySelector("details.files").hidden = !parts.length;
  fill(page, { parts: `${plural(parts.length, "file")} of the ranks, ${bytes(parts.reduce((sum, file) => sum + file.bytes, 0))}` });
}

function draw({ profile, summary }) {
  shown = profile;
  showPin(document.getElementById("recording-actions"), profile);
  const warning = profile.expired ? "Its files made room for others in the disk quota. A pin keeps them." : ["partial", "failed"].includes(profile.state) ? profile.message : "";
  fill(page, { state: stateInWords({ ...profile, missing: [] }), ranks: ranksInWords(profile), warning });
  document.getElementById("profile-warning").hidden = !warning;
  setData(page.querySelector(".job-state .dot"), "tone", toneOf(profile.state));
  setFacts(page.querySelector("dl.facts"), [
    ["Taken", when(profile.created_at)], ["By", profile.actor], ["Reason", profile.reason], ["Steps", count(profile.steps)], ["Size", bytes(profile.bytes)],
    ["Largest token gap it caused", profile.largest_gap_ms === null ? null : `${Math.round(profile.largest_gap_ms)} ms`], ["Clocks aligned by", profile.clock_method], ["Note", profile.note],
  ]);
  drawFiles(profile.files);
  const viewer = page.querySelector("[data-viewer]");
  viewer.hidden = !profile.viewer_url;
  viewer.href = profile.viewer_url ?? "";
  drawRanks(profile.ranks);
  drawSummary(summary);
}

async function refresh() {
  const problem = document.getElementById("profile-problem");
  try {
    draw(await get(`/api/profiles/${id}`));
    problem.hidden = true;
    page.querySelector(".loaded").hidden = false;
    clearTimeout(again);
    if (shown.state === "capturing") again = setTimeout(refresh, CAPTURING_MS);
  } catch (error) {
    problem.hidden = false;
    fill(problem, { text: error.message });
  }
  page.querySelector(".loading").hidden = true;
}

jobsFeed.watch();
jobsFeed.addEventListener("job", ({ detail: job }) => ["profile", "merge_profile", "stop_profile"].includes(job.kind) && refresh());
startActions();
startRecordingActions(() => shown, "profile", (profile) => {
  shown = { ...shown, ...profile };
  showPin(document.getElementById("recording-actions"), shown);
});
refresh();
