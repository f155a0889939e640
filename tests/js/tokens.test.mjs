// Token view: UTF-8 over token borders, epochs of tokens, bins of the ramps.

import assert from "node:assert/strict";
import test from "node:test";

import { EDGES, binOf, epochOfEach, legendOf, probability, spansOf, visible } from "../../static/js/tokens.js";

/** Pieces of the tokens that a text's bytes make when cut into the given sizes; ids are positions. */
function piecesOf(text, sizes) {
  const bytes = new TextEncoder().encode(text);
  const pieces = [];
  for (let at = 0, turn = 0; at < bytes.length; turn += 1) {
    const size = sizes[turn % sizes.length];
    pieces.push(new TextDecoder().decode(bytes.slice(at, at + size)));
    at += size;
  }
  return pieces;
}

const draw = (pieces, text) => spansOf(pieces.map((_, id) => id), (id) => pieces[id], text);

test("spans join to the text whatever the token borders", () => {
  const text = "naïve 世界 👩‍🚀 end";
  for (const sizes of [[1], [2], [3], [1, 4], [5]]) {
    const spans = draw(piecesOf(text, sizes), text);
    assert.equal(spans.map(({ text: part }) => part).join(""), text, String(sizes));
    assert.equal(spans.reduce((sum, { count }) => sum + count, 0), piecesOf(text, sizes).length);
  }
});

test("tokens inside one character make one span", () => {
  assert.deepEqual(draw(piecesOf("é!", [1]), "é!").map(({ text, first, count }) => [text, first, count]), [["é", 0, 2], ["!", 2, 1]]);
});

test("a piece that lost its leading space gets it back from the text", () => {
  assert.deepEqual(draw(["The", "cat"], "The cat").map(({ text }) => text), ["The", " cat"]);
});

test("an end token that is not in the text is a span of its own", () => {
  const spans = draw(["Hi", "<|im_end|>"], "Hi");
  assert.deepEqual(spans.map(({ text, special }) => [text, special]), [["Hi", false], ["<|im_end|>", true]]);
});

test("an answer that was cut inside a character still shows all its tokens", () => {
  const spans = draw(["a", "\ufffd"], "a");
  assert.deepEqual(spans.map(({ text, count }) => [text, count]), [["a", 1], ["", 1]]);
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
});
