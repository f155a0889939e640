// Times and windows of a trace. Pure: microseconds.

const LEAST_SPAN_US = 10;

/** "1.4 ms" for microseconds. */
export function micros(us) {
  if (us >= 1e6) return `${Number((us / 1e6).toPrecision(3))} s`;
  return us >= 1000 ? `${Number((us / 1000).toPrecision(3))} ms` : `${Math.round(us)} µs`;
}

/** Window after a zoom by `factor` around `at`, kept inside the trace. */
export function zoomed({ from, to, begin, end }, factor, at) {
  const span = Math.min(end - begin, Math.max(LEAST_SPAN_US, (to - from) / factor));
  const start = Math.min(Math.max(begin, at - ((at - from) * span) / (to - from)), end - span);
  return { from: start, to: start + span };
}

/** A stable colour for an operation's name: place in the list of chart colours. */
export function hueOf(name) {
  let sum = 0;
  for (const letter of name) sum = (sum * 31 + letter.charCodeAt(0)) >>> 0;
  return sum % 4;
}
