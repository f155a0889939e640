// Errors in words: what happened, and what to do about it. Pure.

const KNOWN = {
  overloaded: ["The engine is full", "Wait a moment and send again, or choose another rank."],
  rate_limit_error: ["You reached your limit of requests", "Wait and send again."],
  engine_unreachable: ["The engine does not answer", "It restarts by itself; the foot of the rail tells when it is back. Then send again."],
  engine_restarting: ["The engine restarted during this answer", "Send again; the text above is kept."],
  worker_unknown: ["That worker is not there", "Choose another route on the right."],
  worker_lost: ["The worker that held this stream is gone", "Send again, or choose another worker on the right."],
  slow_consumer: ["This browser took the answer too slowly", "Close other tabs of this page and send again."],
  quarantined: ["This request ended its rank twice and is refused for 10 minutes", "Change the prompt or the parameters."],
  internal_error: ["A fault inside the server ended this answer", "Send again; if it repeats, look for the id in the server's log."],
  context_length_exceeded: ["The conversation is longer than the model can read", "Start a new conversation, or lower the maximum of new tokens."],
  invalid_request_error: ["The request was not accepted", "Correct the parameters on the right."],
  stop_regex_too_slow: ["The stop expression takes too long to match", "Use a simpler expression or a plain stop text."],
  permission_error: ["Your role may not do this", "Ask an admin for the operator role."],
  authentication_error: ["You are signed out", "Sign in again; what you wrote stays in this page."],
  deadline_exceeded: ["The request waited longer than its deadline", "Send again when fewer requests wait."],
  duplicate_rid: ["This request is running already", "Wait for its answer."],
  not_found: ["What was asked for is not there", "Reload the page."],
};

/** {what, detail, todo}: sentences for an error {type, message, status_code, retry_after_s}. */
export function explain(error) {
  const [what, todo] = KNOWN[error.type] ?? ["The answer ended with an error", "Send again; if it repeats, look at Jobs and the engine's log."];
  const wait = error.retry_after_s ? ` The server suggests ${error.retry_after_s} s.` : "";
  const code = [error.type, error.status_code].filter(Boolean).join(", ");
  const detail = [sentence(error.message), code ? `(${code})` : ""].filter(Boolean).join(" ");
  return { what: `${what}.`, detail, todo: todo + wait };
}

function sentence(text) {
  if (!text) return "";
  const first = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(first) ? first : `${first}.`;
}
