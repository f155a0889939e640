// Tokens as things to look at: their text, their epoch, their place on a ramp. Pure.

const LONGEST_GAP = 4; // characters of text for each token whose piece is not readable

/** Upper edges in nats; a value above the last edge is in the last of 8 bins. */
export const EDGES = {
  logprob: [0.05, 0.25, 0.5, 1, 2, 3, 5],
  entropy: [0.1, 0.5, 1, 1.5, 2, 3, 4],
};

/** Bin 1..8 of a logprob (by its surprise, -logprob) or an entropy, in nats. */
export function binOf(mode, value) {
  const size = mode === "logprob" ? -value : value;
  const place = EDGES[mode].findIndex((edge) => size <= edge);
  return place < 0 ? 8 : place + 1;
}

/** Legend of a mode: [{bin, label}], labels with units as nats of surprise or entropy. */
export function legendOf(mode) {
  const edges = EDGES[mode];
  return [...edges.map((edge, index) => ({ bin: index + 1, label: `≤ ${edge}` })), { bin: 8, label: `> ${edges.at(-1)}` }];
}

/** Epoch of each output token from runs [count, epoch]. */
export function epochOfEach(runs) {
  return runs.flatMap(([count, epoch]) => new Array(count).fill(epoch));
}

/**
 * Spans to draw: [{text, first, count, special}], cut out of `text`, which is the truth. Tokens that
 * end inside a character (their piece holds U+FFFD) are drawn with their neighbours as one span; a
 * piece that is not in the text (an end token) is a special span.
 */
export function spansOf(ids, pieceOf, text) {
  const spans = [];
  let at = 0; // in text
  let first = 0; // token where the span begins that is still open
  for (let index = 0; index < ids.length; index += 1) {
    const piece = pieceOf(ids[index]);
    if (piece === "" || piece.includes("\ufffd")) continue;
    const found = text.indexOf(piece, at);
    const open = index - first;
    const gap = found < 0 ? null : text.slice(at, found);
    if (gap === null || (open === 0 && gap.trim() !== "") || gap.length > LONGEST_GAP * (open + 1)) {
      if (open) spans.push({ text: "", first, count: open, special: false });
      spans.push({ text: piece, first: index, count: 1, special: true });
    } else {
      if (open) spans.push({ text: gap, first, count: open, special: false });
      spans.push({ text: open ? piece : gap + piece, first: index, count: 1, special: false });
      at = found + piece.length;
    }
    first = index + 1;
  }
  if (first < ids.length) spans.push({ text: text.slice(at), first, count: ids.length - first, special: false });
  return spans;
}

/** A token's text with what cannot be seen made visible. */
export function visible(text) {
  return text === "" ? "∅" : text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·");
}

/** exp(logprob) as "97 %" or "0.3 %". */
export function probability(logprob) {
  const share = 100 * Math.exp(logprob);
  return share >= 10 ? `${Math.round(share)} %` : `${share.toPrecision(2)} %`;
}
