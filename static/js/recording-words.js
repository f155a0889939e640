// Profiles and dumps in words. Pure.

import { bytes, percent, plural } from "./format.js";

/** "all 6" or "5 of 6, missing dp1-tp1": never plain success when a rank is missing. */
export function ranksInWords({ ranks_found: found, ranks_expected: expected, missing }) {
  return found === expected ? `all ${expected}` : `${found} of ${expected}, missing ${missing.join(", ")}`;
}

/** A state with what makes it less than it says. */
export function stateInWords({ state, expired, missing }) {
  if (expired) return `${state}, files deleted`;
  return state === "partial" && missing.length ? `partial, missing ${missing.join(", ")}` : state;
}

/** Place of a state among the tones. */
export function toneOf(state) {
  return { ready: "ok", partial: "warn", failed: "bad" }[state] ?? "info";
}

/** What a kind of recordings holds, and what becomes of them: {held, quota, share}. */
export function retentionWords(disk, kind) {
  const own = disk.kinds[kind];
  const share = disk.used_bytes / disk.quota_bytes;
  return {
    held: `${plural(own.items, kind.slice(0, -1))} on disk, ${bytes(own.bytes)}, ${own.pinned} pinned.`,
    quota: `Profiles, dumps and spools fill ${percent(share)} of ${disk.quota_bytes / 1e9} GB; then the oldest that are not pinned go.`,
    share,
  };
}

/** "+1.4 ms", "−12 µs", "±0": a change with its sign. */
export function signed(value, words) {
  if (value === null || value === undefined) return "–";
  const text = words(Math.abs(value));
  return /^0(\.0+)?(\D|$)/.test(text) ? "±0" : `${value > 0 ? "+" : "−"}${text}`;
}

/** 1.25 -> "+25 %", 0.5 -> "−50 %". */
export function ratioInWords(before, after) {
  if (!before || after === null || after === undefined) return "–";
  return signed(after / before - 1, (share) => `${Math.round(100 * share)} %`);
}
