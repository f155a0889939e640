// Fleet page: rank cards, worker table, charts; all from the one fleet feed.

import "./charts.js";
import { mayAct, openAction } from "./action-sheet.js";
import { drawSpark } from "./charts.js";
import { get } from "./api.js";
import { fill, fromTemplate, h, icon, setData } from "./dom.js";
import { feed } from "./feed.js";
import { ageOf, byId, isLoaded, toneOf, totals, versionLine } from "./fleet-state.js";
import { ago, bytes, count, duration, percent, ramp, rate, stepName, when } from "./format.js";
import { KeyedRows } from "./keyed-rows.js";
import { addCommands } from "./palette.js";
import { SampleWindow, epochMarks } from "./series.js";
import { facts, onSheetClose, openSheet, setFacts } from "./sheet.js";

const SHOW_AGE_S = 2;
const STALE_S = 10;
const SPARK_SLOTS = 60;
const LEFT_S = 15;

const page = document.getElementById("fleet");
const grid = document.getElementById("ranks");
const samples = new SampleWindow();
const cards = new Map();
let previous = null;
let openDetail = null; // redraws the open sheet

const nowS = () => Date.now() / 1000;
const rankKey = (rank) => `${rank.dp}.${rank.tp}`;
const versionOf = (view) => (view.weight_version ? `${view.weight_version} · ${stepName(view.token_step, view.epoch)}` : stepName(view.token_step, view.epoch));

// -- engine strip --

function drawEngine({ engine, ranks }) {
  const sum = totals(ranks);
  fill(document.getElementById("engine-stats"), {
    model: engine.model.split("/").at(-1) || "–", version: versionLine({ engine, ranks }), speed: rate(sum.tokens_per_s),
    running: count(sum.running), waiting: count(sum.waiting), kv: percent(sum.kv_used / sum.kv_total),
  });
}

// -- ranks --

function drawRanks({ ranks }) {
  const columns = Math.max(1, ...ranks.map((rank) => rank.tp + 1));
  grid.style.setProperty("--tp", columns);
  if (columns === 1) grid.dataset.wrap = "";
  else delete grid.dataset.wrap;
  const present = new Set(ranks.map(rankKey));
  for (const [key, card] of cards) if (!present.has(key)) { card.remove(); cards.delete(key); }
  for (const rank of [...ranks].sort((a, b) => a.dp - b.dp || a.tp - b.tp)) drawRank(rank);
  document.getElementById("no-ranks").hidden = ranks.length > 0;
  fill(page, { "rank-count": ranks.length ? String(ranks.length) : "" });
}

function drawRank(rank) {
  let card = cards.get(rankKey(rank));
  if (!card) {
    card = fromTemplate("rank-card");
    card.addEventListener("click", () => showRank(rank.dp, rank.tp));
    cards.set(rankKey(rank), card);
    grid.append(card);
  }
  const share = rank.kv_total ? rank.kv_used / rank.kv_total : 0;
  const tone = toneOf(rank.state);
  setData(card, "tone", tone === "ok" ? null : tone);
  setData(card.querySelector(".dot"), "tone", tone);
  card.querySelector(".swatch").hidden = !isLoaded(rank);
  setData(card.querySelector(".swatch"), "ramp", ramp(rank.epoch));
  fill(card, {
    state: rank.state, name: `dp${rank.dp} · tp${rank.tp}`, version: isLoaded(rank) ? versionOf(rank) : "no weights yet", speed: rate(rank.tokens_per_s),
    running: count(rank.running), waiting: count(rank.waiting), step: rank.step_s ? `step ${duration(rank.step_s)}` : "",
    kv: rank.kv_total ? `KV ${count(rank.kv_used)} of ${count(rank.kv_total)} tokens` : "KV –", "kv-share": rank.kv_total ? percent(share) : "",
  });
  const meter = card.querySelector(".meter");
  meter.firstElementChild.style.width = `${Math.min(100, share * 100)}%`;
  setData(meter, "tone", share > 0.95 ? "bad" : share > 0.85 ? "warn" : null);
}

function drawSparks() {
  for (const [key, card] of cards) {
    const [dp] = key.split(".");
    drawSpark(card.querySelector(".spark"), samples.column(`speed.dp${dp}`).slice(-SPARK_SLOTS), SPARK_SLOTS);
  }
}

function drawAges() {
  if (!feed.snapshot) return;
  for (const rank of feed.snapshot.ranks) {
    const card = cards.get(rankKey(rank));
    const age = ageOf(rank.seen_at, feed.state, nowS());
    if (!card) continue;
    fill(card, { age: isLoaded(rank) && age > SHOW_AGE_S ? ago(age) : "" });
    card.classList.toggle("stale-tile", isLoaded(rank) && age > STALE_S);
  }
  for (const worker of shownWorkers(feed.snapshot)) {
    const row = workers.rows.get(worker.id);
    const age = ageOf(worker.seen_at, feed.state, nowS());
    if (!row) continue;
    fill(row, { age: age > SHOW_AGE_S ? ago(age) : "now" });
    row.classList.toggle("stale", age > STALE_S);
  }
}

// -- workers --

const workers = new KeyedRows(document.getElementById("workers"), {
  keyOf: (worker) => worker.id,
  noun: "worker",
  make(worker) {
    const row = fromTemplate("worker-row");
    row.addEventListener("click", () => showWorker(worker.id));
    return row;
  },
  update(row, worker) {
    setData(row.querySelector(".dot"), "tone", toneOf(worker.state));
    fill(row, {
      id: worker.id, kind: worker.kind, state: worker.state, streams: count(worker.streams), lag: duration(worker.lag_s),
      memory: bytes(worker.rss_bytes), pid: worker.pid, since: duration(worker.since && Math.max(0, feed.snapshot.at - worker.since)),
    });
  },
});

const left = new Map(); // web worker by id, as it was last seen before it left

/** The workers and, for a while, those that left: a death is seen, not only a shorter table. */
function shownWorkers(snapshot) {
  const present = new Set(snapshot.workers.map(({ id }) => id));
  for (const worker of left.values()) if (present.has(worker.id) || snapshot.at - worker.seen_at > LEFT_S) left.delete(worker.id);
  return byId([...snapshot.workers, ...left.values()]);
}

function noteLeft(before, now) {
  if (!before || before.engine.generation !== now.engine.generation) return; // a new router knows nobody yet
  const present = new Set(now.workers.map(({ id }) => id));
  for (const worker of before.workers) {
    if (worker.kind === "web" && !present.has(worker.id)) left.set(worker.id, { ...worker, state: "gone", streams: null, lag_s: null, rss_bytes: null, since: null });
  }
}

function drawWorkers(snapshot) {
  noteLeft(previous, snapshot);
  previous = snapshot;
  workers.show(shownWorkers(snapshot));
  document.getElementById("no-workers").hidden = snapshot.workers.length > 0;
  fill(page, { "worker-count": snapshot.workers.length ? String(snapshot.workers.length) : "" });
}

// -- details --

/** Opens a sheet of fact lists that stay live: `lists` gives [[heading, pairs], ...] or null when gone. */
function showDetail(title, lists, actions) {
  const drawn = lists();
  if (!drawn) return;
  const nodes = drawn.map(([, pairs]) => facts(pairs));
  openSheet(title, [
    ...drawn.flatMap(([heading], index) => (heading ? [h("h3", {}, heading), nodes[index]] : [nodes[index]])),
    h("div", { class: "row wrap" }, ...actions),
  ]);
  openDetail = () => lists()?.forEach(([, pairs], index) => setFacts(nodes[index], pairs));
  onSheetClose(() => { openDetail = null; });
}

function chatLink(route, name) {
  return h("a", { class: "button", href: `/playground/?route=${encodeURIComponent(route)}` }, icon("playground"), `Chat through ${name}`);
}

function showRank(dp, tp) {
  const lists = () => {
    const rank = feed.snapshot.ranks.find((one) => one.dp === dp && one.tp === tp);
    return rank && [["", rankFacts(rank)], ["Since start", rankTotals(rank)]];
  };
  showDetail(`Rank dp${dp} · tp${tp}`, lists, [chatLink(`rank:${dp}`, `dp${dp}`), requestsLink(`dp${dp}`), ...drainButton(dp)]);
}

function requestsLink(words) {
  return h("a", { class: "button", href: `/requests/?q=${encodeURIComponent(words)}` }, icon("requests"), "Its requests");
}

function drainButton(dp) {
  if (!mayAct("drain_rank")) return [];
  const drained = feed.snapshot.ranks.some((rank) => rank.dp === dp && rank.state === "draining");
  const act = () => (drained ? openAction("drain_rank", { dp, drain: false }, "put_back") : openAction("drain_rank", { dp }));
  return [h("button", { type: "button", class: "button", onclick: act }, drained ? "Put rank back" : "Drain rank")];
}

function rankFacts(rank) {
  return [
    ["State", rank.state], ["Weights", versionOf(rank)], ["Epoch", rank.epoch], ["Process", rank.pid], ["Memory", bytes(rank.rss_bytes)],
    ["Running", count(rank.running)], ["Waiting", count(rank.waiting)], ["Last step", duration(rank.step_s)],
    ["KV", `${count(rank.kv_used)} of ${count(rank.kv_total)} tokens`],
  ];
}

function rankTotals(rank) {
  const share = rank.prompt_tokens ? ` (${percent(rank.cached_tokens / rank.prompt_tokens)})` : "";
  return [
    ["Prompt tokens", count(rank.prompt_tokens)], ["From cache", `${count(rank.cached_tokens)}${share}`],
    ["Output tokens", count(rank.output_tokens)], ["Retractions", count(rank.retractions)],
  ];
}

function showWorker(id) {
  const find = () => feed.snapshot.workers.find((one) => one.id === id);
  const lists = () => {
    const worker = find();
    return worker && [["", workerFacts(worker)]];
  };
  showDetail(`Worker ${id}`, lists, find()?.kind === "web" ? [chatLink(`worker:${id}`, `worker ${id}`), requestsLink(`worker ${id}`)] : []);
}

function workerFacts(worker) {
  return [
    ["State", worker.state], ["Kind", worker.kind], ["Process", worker.pid], ["Streams", count(worker.streams)],
    ["Loop delay", duration(worker.lag_s)], ["Memory", bytes(worker.rss_bytes)], ["Started", when(worker.since)],
    ["Inbox", h("code", {}, worker.ipc)], ["Reached by", worker.via ? h("code", {}, worker.via) : null],
  ];
}

// -- the engine's actions --

const ACTIONS = [["pause", "Pause engine"], ["continue", "Continue engine"], ["flush_cache", "Flush cache"], ["abort_all", "Abort all requests"]];
const pauseButton = document.getElementById("pause-or-continue");

function drawPause({ engine }) {
  if (!pauseButton) return;
  const name = engine.state === "paused" ? "continue" : "pause";
  pauseButton.hidden = engine.state === "unreachable";
  if (pauseButton.dataset.name === name) return;
  pauseButton.dataset.name = name;
  pauseButton.textContent = ACTIONS.find(([one]) => one === name)[1];
}

pauseButton?.addEventListener("click", () => openAction(pauseButton.dataset.name));
addCommands(() => ACTIONS.filter(([name]) => mayAct(name)).map(([name, label]) => ({ label, kind: "Engine", icon: "fleet", run: () => openAction(name) })));

// -- charts --

const charts = ["speed", "ttft", "itl", "requests", "kv", "step"].map((name) => document.getElementById(`chart-${name}`));
let groupsCharted = "";

function defineCharts(snapshot) {
  const groups = [...new Set(snapshot.ranks.map((rank) => rank.dp))].sort((a, b) => a - b);
  if (groups.join() === groupsCharted) return;
  groupsCharted = groups.join();
  const perGroup = (what) => groups.map((dp, place) => ({ name: `${what}.dp${dp}`, label: `dp${dp}`, colour: `chart-${1 + (place % 4)}`, dashed: place >= 4 }));
  const [speed, ttft, itl, requests, kv, step] = charts;
  const spread = (what, high) => [
    { name: `${what}.p50`, label: "p50", colour: "chart-1" },
    { name: `${what}.${high}`, label: high, colour: "chart-1", bandTo: `${what}.p50` },
  ];
  const total = groups.length > 1 ? [{ name: "speed", label: "all", colour: "text-2", dashed: true }] : [];
  speed.define({ series: [...perGroup("speed"), ...total], window: samples, floor: 10 });
  ttft.define({ series: spread("ttft", "p95"), window: samples, floor: 10 });
  itl.define({ series: spread("itl", "p95"), window: samples, floor: 10 });
  requests.define({ series: [{ name: "running", label: "running", colour: "chart-1" }, { name: "waiting", label: "waiting", colour: "chart-2", dashed: true }], window: samples, floor: 4 });
  kv.define({ series: perGroup("kv"), window: samples, max: 100 });
  step.define({ series: spread("step", "p99"), window: samples, floor: 10 });
}

/** What this page did not see: before it opened, and while the connection was lost. */
async function loadHistory() {
  try {
    samples.load(await get(page.dataset.historyUrl));
    fill(page, { "chart-note": "" });
  } catch (error) {
    fill(page, { "chart-note": `What was before is not shown: ${error.message}` });
  }
}

// -- drive --

function draw() {
  const { snapshot } = feed;
  if (!snapshot) return;
  samples.push(snapshot.at, snapshot.sample);
  if (document.hidden) return;
  drawEngine(snapshot);
  drawPause(snapshot);
  drawRanks(snapshot);
  drawWorkers(snapshot);
  drawSparks();
  drawAges();
  defineCharts(snapshot);
  const marks = epochMarks(samples, snapshot.epochs);
  for (const chart of charts) chart.refresh(marks);
  openDetail?.();
}

let lost = false;
feed.addEventListener("change", draw);
feed.addEventListener("connection", () => {
  const open = feed.connection.name === "open";
  if (open && lost) loadHistory();
  lost = !open;
});
document.addEventListener("visibilitychange", async () => {
  if (document.hidden) return;
  await loadHistory(); // a hidden page hears less
  draw();
});
document.addEventListener("qd-theme", () => drawSparks());
setInterval(() => document.hidden || drawAges(), 1000);
draw();
loadHistory().then(draw);
