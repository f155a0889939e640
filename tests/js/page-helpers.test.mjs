// Small pure parts of the pages: words, numbers, the tree of a conversation, snippets.

import assert from "node:assert/strict";
import test from "node:test";

import { explain } from "../../static/js/advice.js";
import { ago, bytes, duration, exactly, percent, plural, rate, stepName, when, whenShort } from "../../static/js/format.js";
import { readNumber, readStops } from "../../static/js/params.js";
import { backoffMs } from "../../static/js/socket.js";
import { CLIENTS } from "../../static/js/snippets.js";
import { newestBelow, turnsOf } from "../../static/js/tree.js";

test("durations, rates and sizes keep the digits that matter", () => {
  assert.deepEqual([0, 0.0004, 0.084, 0.9996, 1.44, 42, 61, 3900, 90000].map(duration), ["0 ms", "< 1 ms", "84 ms", "1.0 s", "1.4 s", "42 s", "1 min", "1 h 5 min", "1 d 1 h"]);
  assert.deepEqual([0, 0.42, 6.14, 61.3, 1042].map(rate), ["0", "0.42", "6.1", "61", "1,042"]);
  assert.deepEqual([0, 900, 360 * 2 ** 20, 1.3e9].map(bytes), ["0 B", "900 B", "360 MB", "1.2 GB"]);
  assert.deepEqual([ago(4.7), ago(75), percent(0.193), percent(0.001), percent(NaN), plural(1, "token"), plural(213, "token")], ["4 s ago", "1 min ago", "19 %", "< 1 %", "–", "1 token", "213 tokens"]);
});

test("times are shorter the closer they are", () => {
  const now = new Date(2026, 2, 10, 15, 0).getTime() / 1000;
  assert.equal(when(now - 60, now), "14:59");
  assert.equal(when(now - 86400, now), "Mon 15:00");
  assert.equal(whenShort(now - 86400, now), "Mon");
  assert.equal(when(now - 30 * 86400, now), "8 Feb");
  assert.deepEqual([exactly(now - 61, now), exactly(now - 86400, now), exactly(now - 366 * 86400, now)], ["14:58:59", "9 Mar 15:00:00", "9 Mar 2025 15:00:00"]);
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

const messages = [
  { id: 1, role: "user", parent: null }, { id: 2, role: "assistant", parent: 1 },
  { id: 3, role: "user", parent: 2 }, { id: 4, role: "assistant", parent: 3 },
  { id: 5, role: "user", parent: 2 }, { id: 6, role: "assistant", parent: 5 },
];

test("the newest branch is shown, and a question asked anew is a rival of the first", () => {
  const turns = turnsOf(messages);
  assert.deepEqual(turns.map(({ user, answers }) => [user.id, answers[0].id]), [[1, 2], [5, 6]]);
  assert.deepEqual([turns[1].rivals, turns[1].at], [[3, 5], 1]);
  assert.deepEqual(turnsOf(messages, 4).map(({ user }) => user.id), [1, 3]);
  assert.deepEqual(turnsOf(messages, 5)[1].answers, []);
  assert.deepEqual(turnsOf([]), []);
});

test("answers of one comparison stand side by side and one of them leads", () => {
  const compared = [{ id: 1, role: "user", parent: null }, ...[2, 3].map((id) => ({ id, role: "assistant", parent: 1, compare: true })), { id: 4, role: "user", parent: 2 }];
  const [turn] = turnsOf(compared);
  assert.deepEqual([turn.answers.map(({ id }) => id), turn.lead.id], [[2, 3], 2]);
  assert.deepEqual(turnsOf(compared, 3).map(({ lead }) => lead.id), [3]);
});

test("a branch goes on at its newest message", () => {
  assert.equal(newestBelow(messages, 3), 4);
  assert.equal(newestBelow(messages, 1), 6);
  assert.equal(newestBelow(messages, 6), 6);
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

test("an empty parameter is left to the model and a wrong one says what is right", () => {
  assert.deepEqual(readNumber("temperature", " "), {});
  assert.deepEqual(readNumber("temperature", "0"), { value: 0 });
  assert.deepEqual(readNumber("top_p", "0"), { problem: "From above 0 to 1." });
  assert.deepEqual(readNumber("temperature", "3"), { problem: "From 0 to 2." });
  assert.deepEqual(readNumber("max_new_tokens", "1.5"), { problem: "Enter a whole number." });
  assert.deepEqual(readNumber("seed", "x"), { problem: "Enter a number." });
});

test("stop texts are one a line, with line breaks and tabs written out", () => {
  assert.deepEqual(readStops("###\n\n\\n\\nUser:\n\\t"), ["###", "\n\nUser:", "\t"]);
});

test("a lost socket waits longer each time, never over 15 s, and tabs spread out", () => {
  assert.deepEqual([1, 2, 3, 20].map((attempt) => backoffMs(attempt, 1)), [500, 1000, 2000, 15000]);
  assert.equal(backoffMs(1, 0), 250);
});
