// How complete a profile is, in words. Pure.

/** "all 6" or "5 of 6, missing dp1-tp1": never plain success when a rank is missing. */
export function ranksInWords({ ranks_found: found, ranks_expected: expected, missing }) {
  return found === expected ? `all ${expected}` : `${found} of ${expected}, missing ${missing.join(", ")}`;
}
