// Colours of a heat map and words for its cells. Pure: colours are [r, g, b].

/** {low, high, signed} of a grid's cells; null where there is no finite one. A signed scale has its middle at zero. */
export function scaleOf(heat) {
  const cells = heat.flat().filter((cell) => cell !== null);
  if (!cells.length) return null;
  const low = cells.reduce((least, cell) => Math.min(least, cell), Infinity);
  const high = cells.reduce((most, cell) => Math.max(most, cell), -Infinity);
  if (low >= 0 || high <= 0) return { low, high, signed: false };
  const reach = Math.max(-low, high);
  return { low: -reach, high: reach, signed: true };
}

function mixed(from, to, share) {
  return from.map((part, index) => Math.round(part + (to[index] - part) * share));
}

/** Colour of a value: from `ground` to `above`, and below zero of a signed scale to `below`. */
export function colourAt(value, { low, high, signed }, { ground, above, below }) {
  if (signed) return mixed(ground, value < 0 ? below : above, high ? Math.min(1, Math.abs(value) / high) : 0);
  const share = high > low ? (value - low) / (high - low) : 0;
  return high <= 0 ? mixed(below, ground, share) : mixed(ground, above, share);
}

/** "rows 0–8, columns 9–17" of a cell; blocks at the edge are smaller. */
export function placeOf(row, column, { folded, block }) {
  const span = (index, axis) => {
    const first = index * block[axis];
    const last = Math.min(first + block[axis], folded[axis]) - 1;
    return first === last ? `${first}` : `${first}–${last}`;
  };
  const words = (name, text) => `${name}${text.includes("–") ? "s" : ""} ${text}`;
  return `${words("row", span(row, 0))}, ${words("column", span(column, 1))}`;
}

/** Cell after a key, kept inside; null for a key that does not move. */
export function moved([row, column], key, [rows, columns]) {
  const to = {
    ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1],
    Home: [row, 0], End: [row, columns - 1], PageUp: [0, column], PageDown: [rows - 1, column],
  }[key];
  return to ? [Math.min(Math.max(to[0], 0), rows - 1), Math.min(Math.max(to[1], 0), columns - 1)] : null;
}
