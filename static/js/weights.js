// Weights page: timeline, what serves now, versions, checkpoints, "what served at".
//
// GET /api/weights -> {now, versions: [{epoch, weight_version, token_step, started_at, ended_at, job, source,
//   checksum, actor}], updates: [{job, at, state, epoch, message}], groups: [{dp, epoch, weight_version, token_step}],
//   checkpoints: [{id, path, token_step, run, note, bytes, checksum, registered_at, registered_by, state}]}
// newest first; a version that still serves has ended_at null.
// GET /api/weights/at?time=T -> {at, ranks: [{dp, tp, epoch, weight_version, token_step}]}

import "./timeline.js";
import { openAction, startActions } from "./action-sheet.js";
import { get } from "./api.js";
import { fill, fromTemplate, h, setData } from "./dom.js";
import { feed } from "./feed.js";
import { bytes, duration, exactly, ramp, stepName, when } from "./format.js";
import { jobsFeed } from "./jobs-feed.js";
import { facts, openSheet } from "./sheet.js";
import { versionChip } from "./timeline.js";

const TICK_MS = 5000;
const SETTLE_MS = 1500; // the lineage is written down a moment after the ranks tell
const SPANS_S = { hour: 3600, day: 86400, week: 604800 };

const page = document.getElementById("weights");
const timeline = page.querySelector("qd-timeline");
let picture = null;
let seen = feed.snapshot?.ranks.map(({ epoch }) => epoch).join() ?? "";
let soon = 0;
let readAt = 0; // performance.now() when the picture came
let span = ""; // "": a day, or all when that is less

/** The server's clock now: the newest version is still served while the page is open. */
const nowS = () => picture.now + (performance.now() - readAt) / 1000;

function drawTimeline() {
  const oldest = picture.versions.at(-1)?.started_at ?? nowS() - SPANS_S.hour;
  span ||= nowS() - oldest < SPANS_S.day ? "all" : "day";
  const from = span === "all" ? oldest : nowS() - SPANS_S[span];
  timeline.show({ versions: picture.versions, updates: picture.updates, from, to: nowS() });
  for (const button of page.querySelectorAll("[data-span]")) button.setAttribute("aria-pressed", String(button.dataset.span === span));
}

function drawCurrent() {
  const [current] = picture.versions;
  const box = document.getElementById("current-version");
  box.hidden = !current;
  if (!current) return;
  setData(box.querySelector(".swatch"), "ramp", ramp(current.epoch));
  const mixed = new Set(picture.groups.map(({ epoch }) => epoch)).size > 1;
  box.querySelector("dl").hidden = box.querySelector(".swatch").hidden = mixed; // of one version only
  fill(box, {
    version: mixed ? "Mixed" : current.weight_version,
    serving: mixed ? `since ${when(current.started_at)}, ${duration(nowS() - current.started_at)}` : [
      ...(current.token_step === null ? [] : [stepName(current.token_step, current.epoch)]), `epoch ${current.epoch}`,
      `since ${when(current.started_at)}, ${duration(nowS() - current.started_at)}`,
    ].join(" · "),
    source: current.source, checksum: current.checksum || "not taken of the model's own files",
    groups: mixed ? picture.groups.map((group) => `dp${group.dp}: ${group.weight_version}, ${stepName(group.token_step, group.epoch)}`).join(" · ") : "",
  });
}

function drawVersions() {
  document.querySelector("#versions tbody").replaceChildren(...picture.versions.map((version, place) => {
    const row = fromTemplate("version-row");
    row.querySelector("[data-chip]").append(versionChip(version));
    fill(row, {
      step: version.token_step ?? "–", epoch: version.epoch, served: duration((version.ended_at ?? nowS()) - version.started_at),
      since: when(version.started_at), source: version.source, actor: version.actor,
    });
    const back = row.querySelector("[data-do=back]");
    back.hidden = place === 0;
    back.addEventListener("click", (event) => {
      event.stopPropagation();
      openAction("roll_back", { epoch: version.epoch });
    });
    row.addEventListener("click", () => showVersion(version));
    return row;
  }));
}

function drawCheckpoints() {
  const { checkpoints } = picture;
  document.querySelector("#checkpoints tbody").replaceChildren(...checkpoints.map((checkpoint) => {
    const row = fromTemplate("checkpoint-row");
    setData(row.querySelector(".dot"), "tone", checkpoint.state === "ok" ? "ok" : "warn");
    fill(row, { path: checkpoint.path, step: checkpoint.token_step ?? "–", run: checkpoint.run, note: checkpoint.note, size: bytes(checkpoint.bytes), found: when(checkpoint.registered_at), state: checkpoint.state });
    row.querySelector("[data-do=load]").disabled = checkpoint.state !== "ok";
    row.querySelector("[data-do=load]").addEventListener("click", () => openAction("reload_weights", { source: checkpoint.path, token_step: checkpoint.token_step ?? "" }));
    return row;
  }));
  document.getElementById("checkpoints").hidden = !checkpoints.length;
  document.getElementById("no-checkpoints").hidden = checkpoints.length > 0;
}

function showVersion(version) {
  openSheet(version.weight_version, [facts([
    ["Epoch", version.epoch], ["Trainer step", version.token_step], ["Served from", exactly(version.started_at)], ["Until", version.ended_at ? exactly(version.ended_at) : "now"],
    ["Served for", duration((version.ended_at ?? nowS()) - version.started_at)], ["Source", h("code", {}, version.source)], ["Checksum", h("code", {}, version.checksum)],
    ["By", version.actor], ["Update", version.job ? h("a", { href: `/jobs/${version.job}/` }, `job ${version.job}`) : "served since the start"],
  ])]);
}

async function showServedAt(event) {
  event.preventDefault();
  const answer = document.getElementById("served-answer");
  try {
    const time = new Date(event.target.elements.time.value).getTime() / 1000;
    const { ranks } = await get(`/api/weights/at?time=${time}`);
    answer.textContent = ranks.length ? ranks.map((rank) => `dp${rank.dp}·tp${rank.tp}: ${rank.weight_version}, ${stepName(rank.token_step, rank.epoch)}`).join("; ") : "Nothing served then.";
  } catch (error) {
    answer.textContent = error.message;
  }
}

async function refresh() {
  const problem = document.getElementById("weights-problem");
  try {
    picture = await get("/api/weights");
    readAt = performance.now();
    problem.hidden = true;
    page.querySelector(".loading").hidden = true;
    page.querySelector(".loaded").hidden = false;
    drawTimeline();
    drawCurrent();
    drawVersions();
    drawCheckpoints();
  } catch (error) {
    problem.hidden = false;
    fill(problem, { text: `The lineage cannot be read: ${error.message}` });
  }
}

for (const button of page.querySelectorAll("[data-span]")) {
  button.addEventListener("click", () => {
    span = button.dataset.span;
    drawTimeline();
  });
}
timeline.addEventListener("qd-version", ({ detail }) => showVersion(detail));
timeline.addEventListener("qd-update", ({ detail }) => { location.href = `/jobs/${detail.job}/`; });
document.getElementById("served-at").addEventListener("submit", showServedAt);
jobsFeed.watch();
jobsFeed.addEventListener("job", ({ detail: job }) => ["reload_weights", "roll_back", "register_checkpoint"].includes(job.kind) && refresh());

/** Time goes on while nothing happens; a row is not made anew for it. */
function tick() {
  if (document.hidden || !picture?.versions.length) return;
  drawCurrent();
  fill(document.querySelector("#versions tbody tr"), { served: duration(nowS() - picture.versions[0].started_at) });
  if (!timeline.contains(document.activeElement)) drawTimeline();
}

/** Weights also change by the engine's own hand: a rank that comes back, a push without this console. */
function look() {
  const serving = feed.snapshot?.ranks.map(({ epoch }) => epoch).join() ?? "";
  if (serving === seen) return;
  seen = serving;
  clearTimeout(soon);
  soon = setTimeout(refresh, SETTLE_MS);
}

feed.addEventListener("change", look);
setInterval(tick, TICK_MS);
startActions();
refresh();
setInterval(() => document.hidden || refresh(), 10000);
