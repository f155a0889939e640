// Token view: UTF-8 over token borders, epochs of tokens, bins of the ramps.

import assert from "node:assert/strict";
import test from "node:test";

import { EDGES, binOf, epochOfEach, fromBase64, legendOf, probability, spansOf, visible } from "../../static/js/tokens.js";

const encoder = new TextEncoder();

/** Cuts the bytes of a text into tokens of the given sizes; ids are positions. */
function tokensOf(text, sizes) {
  const bytes = encoder.encode(text);
  const parts = [];
  for (let at = 0, turn = 0; at < bytes.length; turn += 1) {
    const size = sizes[turn % sizes.length];
    parts.push(bytes.slice(at, at + size));
    at += size;
  }
  return parts;
}

test("spans join to the text whatever the token borders", () => {
  const text = "naïve 世界 👩‍🚀 end";
  for (const sizes of [[1], [2], [3], [1, 4], [5]]) {
    const parts = tokensOf(text, sizes);
    const spans = spansOf(parts.map((_, id) => id), (id) => parts[id]);
    assert.equal(spans.map(({ text: part }) => part).join(""), text);
    assert.doesNotMatch(spans.map(({ text: part }) => part).join(""), /\ufffd/);
    assert.equal(spans.reduce((sum, { count }) => sum + count, 0), parts.length);
  }
});

test("tokens inside one character make one span", () => {
  const parts = tokensOf("é!", [1]);
  const spans = spansOf([0, 1, 2], (id) => parts[id]);
  assert.deepEqual(spans, [{ text: "é", first: 0, count: 2 }, { text: "!", first: 2, count: 1 }]);
});

test("an answer that was cut inside a character still shows all its tokens", () => {
  const parts = tokensOf("a世", [1, 2]);
  const spans = spansOf([0, 1], (id) => parts[id]);
  assert.deepEqual(spans.map(({ count }) => count), [1, 1]);
  assert.equal(spans[1].text, "\ufffd");
});

test("each token has the epoch of its run", () => {
  assert.deepEqual(epochOfEach([[2, 41], [1, 42]]), [41, 41, 42]);
});

test("bins grow with surprise and with entropy", () => {
  assert.equal(binOf("logprob", -0.01), 1);
  assert.equal(binOf("logprob", -0.7), 4);
  assert.equal(binOf("logprob", -9), 8);
  assert.equal(binOf("entropy", 0), 1);
  assert.equal(binOf("entropy", 4.5), 8);
  for (const mode of Object.keys(EDGES)) assert.equal(legendOf(mode).length, 8);
});

test("what cannot be seen is made visible, and chances are readable", () => {
  assert.equal(visible(" a\n"), "·a↵");
  assert.equal(visible(""), "∅");
  assert.equal(probability(0), "100 %");
  assert.equal(probability(Math.log(0.003)), "0.30 %");
  assert.deepEqual([...fromBase64("4pyT")], [0xe2, 0x9c, 0x93]);
});
