// Timeline of weights, lanes and comparisons of profiles, points and heat maps of dumps: the parts that only compute.

import assert from "node:assert/strict";
import test from "node:test";

import { collapsed, statistic, treeOf } from "../../static/js/dump-tree.js";
import { colourAt, moved, placeOf, scaleOf } from "../../static/js/heat-scale.js";
import { hueOf, micros, zoomed } from "../../static/js/lane-math.js";
import { globPattern, layersIn, selection, toggled } from "../../static/js/point-globs.js";
import { ranksInWords, ratioInWords, retentionWords, signed, stateInWords } from "../../static/js/recording-words.js";
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

const NAMES = ["model.embed_tokens", ...[0, 1].flatMap((layer) => ["attn.q", "attn", "mlp", ""].map((part) => `model.layers.${layer}${part && `.${part}`}`)), "lm_head"];
const POINTS = NAMES.map((name) => ({ name, layer: /layers\.(\d)/.test(name) ? Number(/layers\.(\d)/.exec(name)[1]) : null, kinds: name === "lm_head" ? ["logits"] : ["input", "output"] }));
const ROOT = treeOf(POINTS.map(({ name }) => ({ path: name })));
const at = (path) => path.split(".").reduce((node, name) => node.children.get(name), ROOT);

test("globs match as Python's fnmatch does", () => {
  const matches = (glob, text) => globPattern(glob).test(text);
  assert.ok(matches("model.layers.*.mlp", "model.layers.0.mlp") && matches("*", "a.b") && matches("layer?", "layer1") && matches("l[0-3]", "l2") && matches("l[!0-3]", "l7"));
  assert.ok(!matches("model.layers.*.mlp", "model.layers.0.mlp.up") && !matches("a.b", "axb") && !matches("l[!0-3]", "l2") && !matches("layer?", "layer"));
  assert.ok(matches("a[b", "a[b") && matches("[]]", "]") && matches("(x)+", "(x)+"));
});

test("layers are read as the engine reads them", () => {
  assert.deepEqual([...layersIn("0-2, 7")], [0, 1, 2, 7]);
  assert.deepEqual([layersIn(" "), layersIn("3-1"), layersIn("one"), layersIn("1,")], [null, undefined, undefined, undefined]);
});

test("a selection counts points and tensors, and says what the engine would refuse", () => {
  const all = selection(POINTS, { modules: "*", layers: "", kinds: ["output", "logits"] });
  assert.deepEqual([all.points.length, all.tensors, all.problems], [10, 10, { modules: "", layers: "" }]);
  assert.equal(selection(POINTS, { modules: "*.mlp", layers: "1", kinds: ["input", "output"] }).tensors, 2);
  assert.equal(selection(POINTS, { modules: "*.mlq", layers: "", kinds: ["output"] }).problems.modules, "No dump point matches *.mlq.");
  assert.equal(selection(POINTS, { modules: "lm_head", layers: "0", kinds: ["logits"] }).problems.modules, "lm_head matches points of other layers only.");
  assert.equal(selection(POINTS, { modules: "lm_head", layers: "", kinds: ["output"] }).problems.modules, "These points give logits: choose one of them.");
  assert.equal(selection(POINTS, { modules: "*", layers: "0-4", kinds: ["output"] }).problems.layers, "The model has no layer 2.");
});

test("a box of the tree writes the fewest globs, and takes its points out of wider ones", () => {
  assert.equal(toggled("", ROOT, at("model.layers.0"), POINTS, true), "model.layers.0, model.layers.0.*");
  assert.equal(toggled("lm_head", ROOT, at("model.layers.1.mlp"), POINTS, true), "lm_head, model.layers.1.mlp");
  assert.equal(toggled("lm_head, *.0.mlp", ROOT, at("model.layers.0"), POINTS, true), "lm_head, model.layers.0, model.layers.0.*");
  assert.equal(toggled("lm_head, model.layers.*", ROOT, at("model.layers.0"), POINTS, false), "lm_head, model.layers.1, model.layers.1.*");
  assert.equal(toggled("model.layers.0.attn, model.layers.0.attn.*", ROOT, at("model.layers.0.attn"), POINTS, false), "");
});

test("a heat map with both signs has its middle at zero, and a place names its block", () => {
  const colours = { ground: [0, 0, 0], above: [200, 0, 0], below: [0, 0, 100] };
  const both = scaleOf([[-1, 4], [null, 2]]);
  assert.deepEqual(both, { low: -4, high: 4, signed: true });
  assert.deepEqual([4, 0, -2].map((value) => colourAt(value, both, colours)), [[200, 0, 0], [0, 0, 0], [0, 0, 50]]);
  assert.deepEqual(colourAt(3, scaleOf([[2, 4]]), colours), [100, 0, 0]);
  assert.deepEqual([colourAt(-4, scaleOf([[-2, -4]]), colours), scaleOf([[null]])], [[0, 0, 100], null]);
  const view = { folded: [9, 100], block: [1, 3] };
  assert.equal(placeOf(4, 33, view), "row 4, column 99");
  assert.equal(placeOf(4, 0, view), "row 4, columns 0–2");
  assert.deepEqual([moved([0, 0], "ArrowDown", [2, 3]), moved([0, 0], "ArrowLeft", [2, 3]), moved([1, 0], "End", [2, 3]), moved([0, 0], "x", [2, 3])], [[1, 0], [0, 0], [1, 2], null]);
});

test("changes carry their sign, states what makes them less", () => {
  assert.deepEqual([1400, -12, 0, null].map((us) => signed(us, micros)), ["+1.4 ms", "−12 µs", "±0", "–"]);
  assert.deepEqual([ratioInWords(100, 125), ratioInWords(100, 50), ratioInWords(100, 100.1), ratioInWords(0, 3)], ["+25 %", "−50 %", "±0", "–"]);
  assert.equal(stateInWords({ state: "ready", expired: true, missing: [] }), "ready, files deleted");
  assert.equal(stateInWords({ state: "partial", expired: false, missing: ["dp1-tp0"] }), "partial, missing dp1-tp0");
  const disk = { quota_bytes: 50e9, used_bytes: 5e9, kinds: { dumps: { bytes: 2 ** 20, items: 2, pinned: 1 } } };
  const words = retentionWords(disk, "dumps");
  assert.equal(words.held, "2 dumps on disk, 1.0 MB, 1 pinned.");
  assert.match(words.quota, /fill 10 % of 50 GB/);
});
