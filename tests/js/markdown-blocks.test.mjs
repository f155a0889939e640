// Cutting Markdown into final blocks and a tail must not change what is drawn.

import assert from "node:assert/strict";
import test from "node:test";

import { MarkdownBlocks, toHtml } from "../../static/js/markdown-blocks.js";

const TEXTS = [
  "One line\n\nTwo **bold** lines\nof text.\n",
  "1. first\n2. second\n   more\n\n3. third after a gap\n\nThen text\n",
  "- a\n- b\n\n  inside b\n\n- c\n\n\nafter\n",
  "# Head\ntext\n---\n\n| a | b |\n|---|---|\n| 1 | `x` |\n\n> quote\n> more\n\nend",
  "```python\ndef f():\n\n    return 1\n```\nafter\n\n```\nnever closed\n\nstill code",
  "Title\n=====\n\npara\n\n    indented\n\n    more\n\nend\n",
  "世界 👩‍🚀 naïve\n\n* é\n* ß\n",
  "<script>alert(1)</script>\n\n<b>raw</b> text\n\n![pic](http://x/y.png)\n",
];

function drawInPieces(text, sizes) {
  const blocks = new MarkdownBlocks();
  let html = "";
  let tail = [];
  for (let at = 0, turn = 0; at < text.length; turn += 1) {
    const size = sizes[turn % sizes.length];
    const step = blocks.push(text.slice(at, at + size));
    html += toHtml(step.frozen);
    tail = step.tail;
    at += size;
  }
  return html + toHtml(tail);
}

function drawAtOnce(text) {
  return drawInPieces(text, [text.length]);
}

test("every chunking of a text draws what the whole text draws", () => {
  for (const text of TEXTS) {
    for (const sizes of [[1], [2], [3], [7], [1, 5], [13, 1], [40]]) {
      assert.equal(drawInPieces(text, sizes), drawAtOnce(text), JSON.stringify([text, sizes]));
    }
  }
});

// C17: only the tail is read and drawn again.
test("a long answer keeps a short tail", () => {
  const blocks = new MarkdownBlocks();
  for (let index = 0; index < 500; index += 1) blocks.push(`Paragraph ${index} with some words in it.\n\n`);
  assert.ok(blocks.tail.length < 120, `${blocks.tail.length} characters in the tail`);
});

test("a number at the start of a line stays with the list it may belong to", () => {
  const blocks = new MarkdownBlocks();
  assert.equal(blocks.push("1. one\n\n2").frozen.length, 0);
  const { tail } = blocks.push(". two\n");
  assert.deepEqual(tail.filter(({ type }) => type !== "space").map(({ type }) => type), ["list"]);
});

test("a link that is defined before its use works in later blocks", () => {
  const blocks = new MarkdownBlocks();
  let html = toHtml(blocks.push("[docs]: https://example.org/d\n\ntext\n\n").frozen);
  const { frozen, tail } = blocks.push("see [docs]\n\nend\n");
  html += toHtml(frozen) + toHtml(tail);
  assert.match(html, /href="https:\/\/example\.org\/d"/);
});

test("raw HTML is text and an image is a link", () => {
  const html = drawAtOnce(TEXTS.at(-1));
  assert.doesNotMatch(html, /<script|<b>|<img/);
  assert.match(html, /&lt;script&gt;/);
  assert.match(html, /<a href="http:\/\/x\/y\.png">pic<\/a>/);
});

// C17
test("five thousand tokens draw in a small part of the time they take to come", () => {
  const blocks = new MarkdownBlocks();
  const began = performance.now();
  for (let draw = 0; draw < 1000; draw += 1) {
    const { frozen, tail } = blocks.push(draw % 12 === 0 ? "\n\nA **new** paragraph of " : "some five words and more ");
    toHtml(frozen);
    toHtml(tail);
  }
  const tookS = (performance.now() - began) / 1000;
  assert.ok(tookS < 10, `${tookS.toFixed(1)} s for 1,000 draws, which are 100 s of streaming`);
});
