// Frames of one answer: order, gaps, resume, and what the page may say about a stop.

import assert from "node:assert/strict";
import test from "node:test";

import { joinRuns, newAnswer, skipTo, storedAnswer, takeFrame, tokenCount } from "../../static/js/chat-stream.js";

const started = { type: "started", index: 0, rid: "r1", conversation: 5, message: 9, worker: "2", via: "1" };
const delta = (index, text, ids, epoch = 3) => ({ type: "delta", index, text, token_ids: ids, epochs: [[ids.length, epoch]] });
const end = (index, finish, freed = true) => ({
  type: "end", index, finish, usage: { prompt_tokens: 4, completion_tokens: 3, cached_tokens: 0 }, worker: "2", rank: 1, ttft_ms: 84, tokens_per_s: 61, slot_freed: freed,
});
const STOP = { type: "stop", matched: 2, message: "", status_code: null, err_type: null };
const ABORTED = { type: "abort", matched: null, message: "aborted by the client", status_code: 499, err_type: "aborted" };

function play(frames, answer = newAnswer({ stream: "s", route: "auto" })) {
  for (const frame of frames) takeFrame(answer, frame);
  return answer;
}

test("an answer is the sum of its deltas", () => {
  const answer = play([started, delta(1, "Hel", [1, 2]), delta(2, "lo 世", [3]), end(3, STOP)]);
  assert.equal(answer.text, "Hello 世");
  assert.deepEqual(answer.tokenIds, [1, 2, 3]);
  assert.deepEqual(answer.epochs, [[3, 3]]);
  assert.equal(answer.phase, "done");
  assert.equal(answer.next, 4);
});

test("frames that come twice change nothing", () => {
  const frames = [started, delta(1, "a", [1]), delta(2, "b", [2])];
  const answer = play(frames);
  for (const frame of frames) assert.equal(takeFrame(answer, frame), "old");
  assert.equal(answer.text, "ab");
});

// C3
test("a gap is noticed and the replay from next repairs it", () => {
  const answer = play([started, delta(1, "a", [1])]);
  assert.equal(takeFrame(answer, delta(3, "c", [3])), "gap");
  assert.equal(answer.text, "a");
  play([delta(2, "b", [2]), delta(3, "c", [3])], answer);
  assert.equal(answer.text, "abc");
  assert.equal(answer.skipped, 0);
});

// C3: and the page says how many.
test("frames that are gone for good are counted", () => {
  const answer = play([started, delta(1, "a", [1])]);
  assert.equal(skipTo(answer, delta(5, "f", [6])), "applied");
  assert.equal(answer.skipped, 3);
  assert.equal(answer.text, "af");
});

test("a reload in mid answer goes on from the stored state", () => {
  const before = play([started, delta(1, "a", [1])]);
  const after = JSON.parse(JSON.stringify(before));
  play([delta(1, "a", [1]), delta(2, "b", [2], 4), end(3, STOP)], after);
  assert.equal(after.text, "ab");
  assert.deepEqual(after.epochs, [[1, 3], [1, 4]]);
});

test("a stop is confirmed only by the end frame", () => {
  const answer = play([started, delta(1, "a", [1])]);
  answer.phase = "stopping";
  play([delta(2, "b", [2])], answer);
  assert.equal(answer.phase, "stopping");
  play([end(3, ABORTED, false)], answer);
  assert.equal(answer.phase, "stopped");
  assert.equal(answer.slotFreed, false);
});

test("a stop before the first frame survives the started frame", () => {
  const answer = newAnswer({ stream: "s", route: "auto" });
  answer.phase = "stopping";
  play([started], answer);
  assert.equal(answer.phase, "stopping");
});

test("an abort by the engine is a failure in words", () => {
  const finish = { type: "abort", matched: null, message: "the engine is restarting", status_code: 503, err_type: "engine_restarting" };
  const answer = play([started, delta(1, "a", [1]), end(2, finish)]);
  assert.equal(answer.phase, "failed");
  assert.equal(answer.error.type, "engine_restarting");
  assert.equal(answer.text, "a");
});

test("a refusal ends the answer without text", () => {
  const answer = play([{ type: "error", error: { type: "overloaded", message: "full", status_code: 503, retry_after_s: 4 } }]);
  assert.equal(answer.phase, "failed");
  assert.equal(answer.error.retry_after_s, 4);
});

test("logprobs and entropy grow beside the ids", () => {
  const with_ = (index, ids, values) => ({ ...delta(index, "x", ids), logprobs: values, entropy: values, top: values.map((value) => [[7, value]]) });
  const answer = play([started, with_(1, [1], [-0.1]), with_(2, [2, 3], [-0.2, -0.3])]);
  assert.deepEqual(answer.logprobs, [-0.1, -0.2, -0.3]);
  assert.equal(answer.top.length, 3);
});

test("runs of one epoch join, also over frames", () => {
  assert.deepEqual(joinRuns([[2, 3]], [[1, 3], [2, 4], [0, 5]]), [[3, 3], [2, 4]]);
});

test("an answer whose worker died has no usage and counts what arrived", () => {
  const answer = play([started, delta(1, "ab", [1, 2]), { ...end(2, { type: "abort", err_type: "worker_lost", message: "gone", status_code: 502 }), usage: null }]);
  assert.equal(tokenCount(answer), 2);
  assert.equal(answer.phase, "failed");
});

const stored = { id: 7, state: "done", stream: "s", route: "auto", via: "1", compare: false, top: null, slot_freed: null, text: "a", token_ids: [1], epochs: [[1, 3]], logprobs: null, entropy: null, rid: "r", worker: "1", rank: 0, finish: null, usage: { prompt_tokens: 4, completion_tokens: 1, cached_tokens: 0 }, ttft_ms: 80, tokens_per_s: 60 };

test("a stored message is an answer again", () => {
  const answer = storedAnswer(stored);
  assert.deepEqual([answer.phase, answer.message, tokenCount(answer), answer.slotFreed], ["done", 7, 1, null]);
  assert.equal(storedAnswer({ ...stored, state: "running" }).phase, "lost");
  assert.equal(storedAnswer({ ...stored, state: "failed", finish: { err_type: "worker_lost", message: "m" } }).error.type, "worker_lost");
});
