// The fleet as the console knows it: snapshot, then deltas of changed parts; a gap asks for a snapshot.
// Pure: times are passed in (seconds, this browser's clock).

import { stepName } from "./format.js";

/** State after a frame. `gap` true: the frame did not follow and a snapshot must be asked for. */
export function applyFrame(state, frame, nowS) {
  if (frame.type === "snapshot") {
    const { type: _, ...snapshot } = frame;
    return { snapshot, receivedAt: nowS, gap: false };
  }
  if (!state.snapshot || frame.seq !== state.snapshot.seq + 1) return { ...state, gap: true };
  const { type: _, ...changed } = frame;
  return { snapshot: { ...state.snapshot, ...changed }, receivedAt: nowS, gap: false };
}

/** Seconds since the engine spoke of something: its age in the frame plus the frame's age here. */
export function ageOf(seenAt, state, nowS) {
  return Math.max(0, state.snapshot.at - seenAt) + Math.max(0, nowS - state.receivedAt);
}

const TONES = {
  running: "ok", ready: "ok", ok: "ok", serving: "ok",
  starting: "info", updating: "info", draining: "info", loading: "info",
  pausing: "warn", paused: "warn", mixed: "warn", lagging: "warn", stopping: "warn",
};

/** ok, info, warn or bad; a state that is not known is bad, never silently fine. */
export function toneOf(stateName) {
  return TONES[stateName] ?? "bad";
}

/** Totals over the ranks that lead a group (tp 0), so followers are not counted twice. */
export function totals(ranks) {
  const sum = { tokens_per_s: 0, running: 0, waiting: 0, kv_used: 0, kv_total: 0 };
  for (const rank of ranks) {
    if (rank.tp !== 0) continue;
    for (const name of Object.keys(sum)) sum[name] += rank[name];
  }
  return sum;
}

const SILENT_S = 5;

/**
 * The one-line truth: {tone, word, bar}. `bar` is {tone, text} when something must be said on every
 * page, else null. `connection` is LiveSocket's state; times in seconds.
 */
export function engineTruth(state, connection, nowS) {
  if (connection.name === "refused") {
    return { tone: "bad", word: "Signed out", bar: { tone: "bad", text: "Your session has ended. Sign in again to see live values." } };
  }
  if (connection.name !== "open") return lostTruth(state, connection, nowS);
  if (!state.snapshot) return { tone: "info", word: "Waiting", bar: null };
  const silence = nowS - state.receivedAt;
  if (silence > SILENT_S) {
    const text = `No sign of life from the engine for ${Math.floor(silence)} s. It restarts by itself; values here are old.`;
    return { tone: "bad", word: "Silent", bar: { tone: "bad", text } };
  }
  return { tone: toneOf(state.snapshot.engine.state), word: capital(state.snapshot.engine.state), bar: stateBar(state.snapshot) };
}

function lostTruth(state, connection, nowS) {
  const lostFor = Math.floor(nowS - connection.since / 1000);
  if (lostFor < 2) return { tone: "info", word: state.snapshot ? "Reconnecting" : "Connecting", bar: null };
  const next = connection.retryAt / 1000 - nowS;
  const then = next >= 1 ? `next try in ${Math.ceil(next)} s` : "trying now";
  return { tone: "warn", word: "No connection", bar: { tone: "warn", text: `Connection lost ${lostFor} s ago, ${then}. Values here are old.` } };
}

function stateBar({ engine, ranks }) {
  const why = engine.reason ? `: ${engine.reason}` : "";
  const absent = absentRanks(ranks);
  const texts = {
    starting: { tone: "info", text: `The engine is starting${why}. Requests wait until it is ready.` },
    pausing: { tone: "warn", text: `The engine is pausing${why}.` },
    paused: { tone: "warn", text: `The engine is paused${why}. Requests wait until it continues.` },
    updating: { tone: "info", text: `New weights are being prepared${why}. Serving goes on.` },
    mixed: versionsByGroup(ranks),
    degraded: { tone: "bad", text: `Degraded${why || (absent && `: ${absent}`)}.` },
    stopping: { tone: "warn", text: `The engine is stopping${why}.` },
    unreachable: { tone: "bad", text: `The engine does not answer${why}. It restarts by itself; requests are refused until it is back.` },
  };
  if (texts[engine.state]) return texts[engine.state];
  return absent ? { tone: "bad", text: `${capital(absent)}. The other ranks go on.` } : null;
}

/** Workers in the order of their names, 2 before 10. */
export function byId(workers) {
  return [...workers].sort((a, b) => a.id.localeCompare(b.id, "en", { numeric: true }));
}

/** A rank that has not reported since it started has no weights yet. */
export function isLoaded(rank) {
  return rank.seen_at > 0;
}

/** "dp0·tp0 is starting, ..." of the ranks that do not serve. */
function absentRanks(ranks) {
  const absent = ranks.filter((rank) => toneOf(rank.state) !== "ok");
  return absent.map((rank) => `dp${rank.dp}·tp${rank.tp} is ${rank.state}`).join(", ");
}

function versionsByGroup(ranks) {
  const leads = ranks.filter((rank) => rank.tp === 0 && isLoaded(rank));
  const parts = leads.map((rank) => `dp${rank.dp} serves ${rank.weight_version || `epoch ${rank.epoch}`}`);
  const absent = absentRanks(ranks);
  if (absent) parts.push(absent);
  return { tone: "warn", text: parts.length ? `Mixed weights: ${parts.join(", ")}.` : "Mixed weights." };
}

/** "policy-3 · step 1042"; while the groups differ, each version once: "policy-3, canary-1". */
export function versionLine({ engine, ranks }) {
  if (engine.epoch !== null) {
    const step = stepName(engine.token_step, engine.epoch);
    return engine.weight_version ? `${engine.weight_version} · ${step}` : step;
  }
  const names = ranks.filter(isLoaded).map((rank) => rank.weight_version || stepName(rank.token_step, rank.epoch));
  return [...new Set(names)].join(", ") || "no weights yet";
}

function capital(word) {
  return word.charAt(0).toUpperCase() + word.slice(1);
}
