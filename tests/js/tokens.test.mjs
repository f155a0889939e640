// Token view: UTF-8 over token borders, epochs of tokens, bins of the ramps.

import assert from "node:assert/strict";
import test from "node:test";

import { EDGES, binOf, epochOfEach, fromBase64, legendOf, probability, spansOf, visible } from "../../static/js/tokens.js";

/** Tokens that a text's bytes make when cut into the given sizes. */
function tokensOf(text, sizes) {
  const bytes = new TextEncoder().encode(text);
  const tokens = [];
  for (let at = 0, turn = 0; at < bytes.length; turn += 1) {
    const size = sizes[turn % sizes.length];
    tokens.push(bytes.slice(at, at + size));
    at += size;
  }
  return tokens;
}

const draw = (tokens, text) => spansOf(tokens.map((_, id) => id), (id) => tokens[id], text);

// C16
test("spans join to the text whatever the token borders", () => {
  const text = "naïve 世界 👩‍🚀 end";
  for (const sizes of [[1], [2], [3], [1, 4], [5]]) {
    const spans = draw(tokensOf(text, sizes), text);
    assert.equal(spans.map(({ text: part }) => part).join(""), text, String(sizes));
    assert.equal(spans.reduce((sum, { count }) => sum + count, 0), tokensOf(text, sizes).length);
    assert.ok(spans.every(({ outside }) => !outside));
  }
});

test("tokens inside one character make one span", () => {
  assert.deepEqual(draw(tokensOf("é!", [1]), "é!").map(({ text, first, count }) => [text, first, count]), [["é", 0, 2], ["!", 2, 1]]);
});

test("an end token and a trimmed stop are outside of the text", () => {
  const tokens = ["Hi", " ###", "<|im_end|>"].map((piece) => new TextEncoder().encode(piece));
  assert.deepEqual(draw(tokens, "Hi").map(({ outside }) => outside), [false, true, true]);
});

test("an answer that was cut inside a character still shows all its tokens", () => {
  const spans = draw(tokensOf("a世", [1, 2]).slice(0, 2), "a");
  assert.deepEqual(spans.map(({ text, count, outside }) => [text, count, outside]), [["a", 1, false], ["\ufffd", 1, true]]);
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
