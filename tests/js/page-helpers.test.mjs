// Small pure parts of the pages: words, numbers, the tree of a conversation, snippets.

import assert from "node:assert/strict";
import test from "node:test";

import { explain } from "../../static/js/advice.js";
import { ago, bytes, duration, percent, plural, rate, stepName, when, whenShort } from "../../static/js/format.js";
import { CLIENTS } from "../../static/js/snippets.js";
import { turnsOf } from "../../static/js/tree.js";

test("durations, rates and sizes keep the digits that matter", () => {
  assert.deepEqual([0, 0.0004, 0.084, 0.9996, 1.44, 42, 61, 3900, 90000].map(duration), ["0 ms", "< 1 ms", "84 ms", "1.0 s", "1.4 s", "42 s", "1 min", "1 h 5 min", "1 d 1 h"]);
  assert.deepEqual([0, 0.42, 6.14, 61.3, 1042].map(rate), ["0", "0.42", "6.1", "61", "1,042"]);
  assert.deepEqual([0, 900, 360 * 2 ** 20, 1.3e9].map(bytes), ["0 B", "900 B", "360 MB", "1.2 GB"]);
  assert.deepEqual([ago(4.7), ago(75), percent(0.193), percent(NaN), plural(1, "token"), plural(213, "token")], ["4 s ago", "1 min ago", "19 %", "–", "1 token", "213 tokens"]);
});

test("times are shorter the closer they are", () => {
  const now = new Date(2026, 2, 10, 15, 0).getTime() / 1000;
  assert.equal(when(now - 60, now), "14:59");
  assert.equal(when(now - 86400, now), "Mon 15:00");
  assert.equal(whenShort(now - 86400, now), "Mon");
  assert.equal(when(now - 30 * 86400, now), "8 Feb");
});

test("a step without a trainer is named by its epoch", () => {
  assert.equal(stepName(1042, 3), "step 1042");
  assert.equal(stepName(null, 0), "epoch 0");
  assert.equal(stepName(undefined, undefined), "no epoch");
});

test("an error says what, why and what to do, known or not", () => {
  const known = explain({ type: "overloaded", message: "512 requests wait", status_code: 503, retry_after_s: 4 });
  assert.equal(known.what, "The engine is full.");
  assert.match(known.detail, /512 requests wait\. \(overloaded, 503\)/);
  assert.match(known.todo, /4 s/);
  const unknown = explain({ type: "odd", message: "", status_code: null, retry_after_s: 0 });
  assert.ok(unknown.what && unknown.todo);
});

test("messages without parents are one chain of turns", () => {
  const messages = [{ id: 1, role: "user" }, { id: 2, role: "assistant" }, { id: 3, role: "user" }, { id: 4, role: "assistant" }];
  assert.deepEqual(turnsOf(messages).map(({ user, answers }) => [user.id, answers.map(({ id }) => id)]), [[1, [2]], [3, [4]]]);
});

test("answers of one comparison stand side by side, branches do not", () => {
  const compared = [{ id: 1, role: "user", parent: null }, { id: 2, role: "assistant", parent: 1, compare: true }, { id: 3, role: "assistant", parent: 1, compare: true }];
  assert.deepEqual(turnsOf(compared)[0].answers.map(({ id }) => id), [2, 3]);
  const branched = compared.map((message) => ({ ...message, compare: false }));
  const [turn] = turnsOf(branched);
  assert.deepEqual([turn.answers.map(({ id }) => id), turn.answerRivals.map(({ id }) => id)], [[3], [2, 3]]);
  assert.deepEqual(turnsOf(branched, 2)[0].answers.map(({ id }) => id), [2]);
});

test("a question that was asked anew is a rival of the first", () => {
  const messages = [
    { id: 1, role: "user", parent: null }, { id: 2, role: "assistant", parent: 1 },
    { id: 3, role: "user", parent: 2 }, { id: 4, role: "assistant", parent: 3 },
    { id: 5, role: "user", parent: 2 }, { id: 6, role: "assistant", parent: 5 },
  ];
  const turns = turnsOf(messages);
  assert.deepEqual(turns.map(({ user }) => user.id), [1, 5]);
  assert.deepEqual([turns[1].rivals.length, turns[1].at], [2, 1]);
});

test("snippets hold the address and either the key or the variable", () => {
  for (const make of Object.values(CLIENTS)) {
    const plain = make({ base: "http://h:8000", model: "default", key: "" }).map(({ text }) => text).join("\n");
    assert.match(plain, /http:\/\/h:8000/);
    const keyed = make({ base: "http://h:8000", model: "default", key: "qd-abc" }).map(({ text }) => text).join("\n");
    assert.match(keyed, /qd-abc/);
    assert.doesNotMatch(keyed, /QUARTERDECK_KEY/);
  }
});
