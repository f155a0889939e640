// Tokens as things to look at: their text, their epoch, their place on a ramp. Pure.

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
 * Spans to draw: [{text, first, count, outside}]. One streaming decoder reads the bytes of all tokens,
 * so tokens that end inside a character are drawn with the token that completes it. `outside` marks
 * what is not in the answer's text: end tokens, a trimmed stop.
 */
export function spansOf(ids, bytesOf, text) {
  const decoder = new TextDecoder();
  const spans = [];
  let first = 0;
  let at = 0; // in text
  for (let index = 0; index < ids.length; index += 1) {
    const last = index === ids.length - 1;
    const piece = decoder.decode(bytesOf(ids[index]), { stream: !last });
    if (!piece && !last) continue;
    const outside = !text.startsWith(piece, at);
    spans.push({ text: piece, first, count: index - first + 1, outside });
    if (!outside) at += piece.length;
    first = index + 1;
  }
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

/** Bytes of base64 text. */
export function fromBase64(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}
