// What the console knows of the fleet and how it says so.

import assert from "node:assert/strict";
import test from "node:test";

import { ageOf, applyFrame, engineTruth, toneOf, totals, versionLine } from "../../static/js/fleet-state.js";
import { SampleWindow, epochMarks } from "../../static/js/series.js";

const rank = (dp, tp, more = {}) => ({ dp, tp, state: "running", epoch: 1, weight_version: "v1", token_step: 10, running: 2, waiting: 1, kv_used: 50, kv_total: 100, tokens_per_s: 30, step_s: 0.02, seen_at: 100, ...more });
const engine = { state: "running", epoch: 1, weight_version: "v1", token_step: 10, model: "m", reason: "" };
const snapshot = { seq: 7, at: 100, engine, workers: [], ranks: [rank(0, 0), rank(0, 1), rank(1, 0)], counters: {} };
const empty = { snapshot: null, receivedAt: 0, gap: false };
const open = { name: "open", since: 0, retryAt: 0, attempt: 0 };
const whole = applyFrame(empty, { type: "snapshot", ...snapshot }, 500);

test("a delta replaces the parts it names and keeps the others", () => {
  const next = applyFrame(whole, { type: "delta", seq: 8, at: 101, workers: [{ id: "1" }] }, 501);
  assert.equal(next.gap, false);
  assert.equal(next.snapshot.workers.length, 1);
  assert.equal(next.snapshot.ranks.length, 3);
});

test("a delta that does not follow asks for a snapshot and changes nothing", () => {
  const next = applyFrame(whole, { type: "delta", seq: 9, at: 102, ranks: [] }, 502);
  assert.equal(next.gap, true);
  assert.equal(next.snapshot, whole.snapshot);
  assert.equal(applyFrame(empty, { type: "delta", seq: 1, at: 1 }, 1).gap, true);
});

test("ages do not depend on the clocks of server and browser", () => {
  assert.equal(ageOf(98, whole, 503), 5);
});

test("followers of a group are not counted twice", () => {
  assert.deepEqual(totals(snapshot.ranks), { tokens_per_s: 60, running: 4, waiting: 2, kv_used: 100, kv_total: 200 });
});

test("a state that nobody knows is never shown as fine", () => {
  assert.equal(toneOf("running"), "ok");
  assert.equal(toneOf("flying"), "bad");
});

test("a quiet fleet says nothing in the bar", () => {
  assert.deepEqual(engineTruth(whole, open, 501), { tone: "ok", word: "Running", bar: null });
});

test("silence of the engine is said after five seconds", () => {
  const truth = engineTruth(whole, open, 507);
  assert.equal(truth.word, "Silent");
  assert.match(truth.bar.text, /7 s/);
});

test("a lost connection is said with the next try", () => {
  const truth = engineTruth(whole, { name: "waiting", since: 490_000, retryAt: 503_000, attempt: 3 }, 500);
  assert.match(truth.bar.text, /lost 10 s ago, next try in 3 s/);
});

test("mixed weights name what each group serves", () => {
  const mixed = { ...snapshot, engine: { ...engine, state: "mixed" }, ranks: [rank(0, 0), rank(1, 0, { weight_version: "v2" })] };
  const truth = engineTruth({ snapshot: mixed, receivedAt: 500 }, open, 500);
  assert.match(truth.bar.text, /dp0 serves v1, dp1 serves v2/);
  const starting = { ...mixed, ranks: [rank(0, 0), rank(1, 0, { state: "starting", seen_at: 0 })] };
  assert.equal(engineTruth({ snapshot: starting, receivedAt: 500 }, open, 500).bar.text, "Mixed weights: dp0 serves v1, dp1·tp0 is starting.");
  assert.equal(versionLine({ ...mixed, engine: { ...mixed.engine, epoch: null, weight_version: null, token_step: null } }), "v1, v2");
  assert.equal(versionLine(snapshot), "v1 · step 10");
});

test("a rank that is down is named while the engine runs", () => {
  const down = { ...snapshot, ranks: [rank(0, 0), rank(1, 0, { state: "restarting" })] };
  assert.match(engineTruth({ snapshot: down, receivedAt: 500 }, open, 500).bar.text, /dp1·tp0 is restarting/i);
  const degraded = { ...down, engine: { ...engine, state: "degraded" } };
  assert.equal(engineTruth({ snapshot: degraded, receivedAt: 500 }, open, 500).bar.text, "Degraded: dp1·tp0 is restarting.");
});

test("a window forgets what is older than its length and pads what came later", () => {
  const window = new SampleWindow(10);
  for (let time = 0; time <= 20; time += 1) window.push(time, time < 15 ? { a: time } : { a: time, b: 1 });
  window.push(20, { a: 99 });
  assert.equal(window.times[0], 10);
  assert.equal(window.column("a").length, window.times.length);
  assert.deepEqual(window.column("b").slice(0, 5), [null, null, null, null, null]);
  assert.equal(window.last("a"), 20);
});

test("a young chart shows two minutes and grows to the whole window", () => {
  const window = new SampleWindow(900);
  window.push(1000, { a: 1 });
  window.push(1010, { a: 1 });
  assert.deepEqual(window.range(), { min: 890, max: 1010 });
  window.push(1500, { a: 1 });
  assert.deepEqual(window.range(), { min: 1000, max: 1500 });
  for (let time = 1501; time <= 2500; time += 1) window.push(time, { a: 1 });
  assert.deepEqual(window.range(), { min: 1600, max: 2500 });
});

test("the server's memory fills a window and never empties it", () => {
  const window = new SampleWindow(900);
  window.load({ times: [1, 2], columns: { a: [5, 6] } });
  window.push(3, { a: 7, b: 1 });
  assert.deepEqual(window.column("a"), [5, 6, 7]);
  assert.deepEqual(window.column("b"), [null, null, 1]);
  window.load({ times: [3], columns: { a: [9] } });
  assert.equal(window.times.length, 3);
});

test("new weights are marked once, at the first group that serves them", () => {
  const window = new SampleWindow(900);
  const epochs = [[1, 1], [1, null], [1, 2], [null, 2], [2, 2], [3, 2]];
  epochs.forEach(([dp0, dp1], at) => window.push(at, { "epoch.dp0": dp0, "epoch.dp1": dp1, speed: at }));
  const labels = { 2: { weight_version: "v2", token_step: 11 } };
  assert.deepEqual(epochMarks(window, labels), [{ at: 2, epoch: 2, label: "step 11" }, { at: 5, epoch: 3, label: "epoch 3" }]);
});
