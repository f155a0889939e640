// One answer as its frames arrive. Pure: frames in, state out; order, gaps and resume live here.

/** A fresh answer. `next` is the index of the frame that must come next. */
export function newAnswer({ stream, route, conversation = null, sentAt = 0 }) {
  return {
    stream, route, conversation, sentAt, next: 0, phase: "sent", skipped: 0,
    text: "", tokenIds: [], epochs: [], logprobs: null, entropy: null, top: null,
    message: null, rid: "", worker: "", via: "", rank: null,
    finish: null, usage: null, ttftMs: null, tokensPerS: null, slotFreed: null, error: null,
  };
}

/** True while frames may still come. */
export function isLive(answer) {
  return answer.phase === "sent" || answer.phase === "streaming" || answer.phase === "stopping";
}

/**
 * Takes one frame: "applied"; "old" (seen before, ignored); or "gap": frames between are missing and
 * nothing was changed, so a resume from `answer.next` must be asked for.
 */
export function takeFrame(answer, frame) {
  if (frame.type === "error") {
    answer.phase = "failed";
    answer.error = frame.error;
    return "applied";
  }
  if (frame.index < answer.next) return "old";
  if (frame.index > answer.next) return "gap";
  answer.next = frame.index + 1;
  TAKE[frame.type]?.(answer, frame);
  return "applied";
}

/** After a repair that could not bring the missing frames back: go on from here and say so. */
export function skipTo(answer, frame) {
  answer.skipped += frame.index - answer.next;
  answer.next = frame.index;
  return takeFrame(answer, frame);
}

const TAKE = {
  started(answer, frame) {
    answer.phase = answer.phase === "stopping" ? "stopping" : "streaming";
    Object.assign(answer, { message: frame.message, conversation: frame.conversation, rid: frame.rid, worker: frame.worker, via: frame.via });
  },
  delta(answer, frame) {
    answer.text += frame.text;
    answer.tokenIds.push(...frame.token_ids);
    joinRuns(answer.epochs, frame.epochs);
    answer.logprobs = extend(answer.logprobs, frame.logprobs);
    answer.entropy = extend(answer.entropy, frame.entropy);
    answer.top = extend(answer.top, frame.top);
  },
  end(answer, frame) {
    const { finish } = frame;
    Object.assign(answer, {
      finish, usage: frame.usage, worker: frame.worker, rank: frame.rank,
      ttftMs: frame.ttft_ms, tokensPerS: frame.tokens_per_s, slotFreed: frame.slot_freed,
      phase: phaseOf(answer.phase, finish),
    });
    if (answer.phase === "failed") answer.error = errorOf(finish);
  },
};

function errorOf({ err_type: type, message, status_code: code }) {
  return { type, message, status_code: code, retry_after_s: 0 };
}

/** "done", "stopped" (the user's wish, now confirmed by the engine) or "failed". */
function phaseOf(phase, finish) {
  if (finish.type !== "abort") return "done";
  return phase === "stopping" || finish.err_type === "aborted" || !finish.err_type ? "stopped" : "failed";
}

function extend(list, more) {
  if (!more) return list;
  return list ? (list.push(...more), list) : [...more];
}

/** Appends runs [count, epoch] and joins neighbours of one epoch. */
export function joinRuns(runs, more) {
  for (const [count, epoch] of more) {
    const last = runs.at(-1);
    if (last && last[1] === epoch) last[0] += count;
    else if (count) runs.push([count, epoch]);
  }
  return runs;
}

/** An answer out of a stored message of `/api/conversations/<id>`. */
export function storedAnswer(message) {
  return Object.assign(newAnswer({ stream: message.stream, route: message.route }), {
    phase: message.state === "running" ? "lost" : message.state,
    message: message.id, text: message.text, tokenIds: message.token_ids, epochs: message.epochs,
    logprobs: message.logprobs, entropy: message.entropy, top: message.top, rid: message.rid,
    worker: message.worker, via: message.via, rank: message.rank, finish: message.finish, usage: message.usage,
    ttftMs: message.ttft_ms, tokensPerS: message.tokens_per_s, slotFreed: message.slot_freed,
    error: message.state === "failed" ? errorOf(message.finish ?? {}) : null,
  });
}

/** Number of output tokens: what the engine says, else what has arrived. */
export function tokenCount(answer) {
  return answer.usage?.completion_tokens ?? answer.tokenIds.length;
}
