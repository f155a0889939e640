// A histogram of a tensor as an SVG; heights are logarithmic, since most tensors have long tails.

import { statistic } from "./dump-tree.js";

const SVG = "http://www.w3.org/2000/svg";
const TALL = 24;

/** `counts` in equal bins from `low` to `high`. */
export function histogram({ low, high, counts }) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${counts.length} ${TALL}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", "histogram");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `Histogram from ${statistic(low)} to ${statistic(high)}`);
  const top = Math.max(1, ...counts.map((value) => Math.log1p(value)));
  counts.forEach((value, index) => {
    const bar = document.createElementNS(SVG, "rect");
    const tall = ((TALL - 2) * Math.log1p(value)) / top;
    for (const [name, size] of Object.entries({ x: index, y: TALL - tall, width: 0.9, height: tall })) bar.setAttribute(name, size);
    svg.append(bar);
  });
  return svg;
}
