// Timeline of weights, lanes of a profile, points of a dump: the parts that only compute.

import assert from "node:assert/strict";
import test from "node:test";

import { collapsed, statistic, treeOf } from "../../static/js/dump-tree.js";
import { hueOf, micros, zoomed } from "../../static/js/lane-math.js";
import { ranksInWords } from "../../static/js/profile-words.js";
import { marksOf, segmentsOf, ticksOf } from "../../static/js/timeline-layout.js";

const version = (epoch, from, to) => ({ epoch, weight_version: `policy-${epoch}`, token_step: 1000 + epoch, started_at: from, ended_at: to });
const window = { from: 1000, to: 2000, width: 1000 };

test("a version is as long as it served and is cut at the window", () => {
  const [one, two] = segmentsOf([version(2, 1600, null), version(1, 500, 1600)], window);
  assert.deepEqual([one.x, one.width], [600, 400]);
  assert.deepEqual([two.x, two.width], [0, 600]);
  assert.equal(one.label, "policy-2 · step 1002");
});

test("a version outside the window is not drawn, a short one still can be seen", () => {
  assert.deepEqual(segmentsOf([version(1, 100, 900)], window), []);
  const [short] = segmentsOf([version(1, 1500, 1500.1)], window);
  assert.ok(short.width >= 2);
  assert.equal(short.label, "");
});

test("a canary is drawn beside the version that went on, a version that took over is not", () => {
  const lanes = segmentsOf([version(3, 1800, null), version(2, 1500, 1600), version(1, 1000, 1801)], window).map(({ lane }) => lane);
  assert.deepEqual(lanes, [0, 1, 0]);
});

test("a version that has only just begun is drawn at the right edge", () => {
  assert.equal(segmentsOf([version(1, 2000, null)], window)[0].x, 1000);
});

test("marks and ticks lie inside the window", () => {
  assert.deepEqual(marksOf([{ at: 900 }, { at: 1500 }, { at: 2100 }], window).map(({ x }) => x), [500]);
  const ticks = ticksOf(window);
  assert.ok(ticks.length >= 2 && ticks.length <= 9);
  assert.ok(ticks.every(({ at, x }) => at >= 1000 && at <= 2000 && x >= 0 && x <= 1000));
});

test("a zoom keeps its point and stays inside the trace", () => {
  const trace = { begin: 0, end: 1000, from: 0, to: 1000 };
  assert.deepEqual(zoomed(trace, 2, 500), { from: 250, to: 750 });
  assert.deepEqual(zoomed({ ...trace, from: 250, to: 750 }, 0.25, 500), { from: 0, to: 1000 });
  assert.deepEqual(zoomed(trace, 1e9, 1000), { from: 990, to: 1000 });
});

test("times of a trace are short, colours of a name stay", () => {
  assert.deepEqual([12, 1400, 50000, 2.5e6].map(micros), ["12 µs", "1.4 ms", "50 ms", "2.5 s"]);
  assert.equal(hueOf("aten::linear"), hueOf("aten::linear"));
});

test("a profile that misses a rank never reads as whole", () => {
  assert.equal(ranksInWords({ ranks_found: 4, ranks_expected: 4, missing: [] }), "all 4");
  assert.equal(ranksInWords({ ranks_found: 5, ranks_expected: 6, missing: ["dp1-tp1"] }), "5 of 6, missing dp1-tp1");
});

test("points become a tree whose single chains are one line", () => {
  const tree = collapsed(treeOf([{ path: "model.layers.0.mlp" }, { path: "model.layers.1.mlp" }, { path: "lm_head" }, { path: "lm_head" }]));
  assert.deepEqual(tree.map(({ name }) => name), ["model.layers", "lm_head"]);
  assert.deepEqual(tree[0].children.map(({ name, path }) => [name, path]), [["0.mlp", "model.layers.0.mlp"], ["1.mlp", "model.layers.1.mlp"]]);
  assert.deepEqual(tree[1].points, [2, 3]);
});

test("statistics keep what the eye compares", () => {
  assert.deepEqual([null, 0, 0.8125, -1.23456789, 1.5e-6, 123456, Number.NaN].map(statistic), ["–", "0", "0.8125", "-1.2346", "1.500e-6", "1.235e+5", "NaN"]);
});
