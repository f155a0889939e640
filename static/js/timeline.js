// <qd-timeline>: versions of weights over time; length is the time served, marks are update jobs.

import { h, setData } from "./dom.js";
import { duration, ramp, when } from "./format.js";
import { marksOf, segmentsOf, ticksOf } from "./timeline-layout.js";

const SVG = "http://www.w3.org/2000/svg";
const BAR_TOP = 18;
const BAR_HEIGHT = 44;
const LANE_SHIFT = 24; // a canary leaves the upper part to the version it runs beside
const HEIGHT = 90;

function s(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** `show({versions, updates, from, to})`; events "qd-version" and "qd-update" with the item in detail. */
class Timeline extends HTMLElement {
  connectedCallback() {
    new ResizeObserver(() => this.draw()).observe(this);
  }

  show(picture) {
    this.picture = picture;
    this.draw();
  }

  draw() {
    if (!this.picture || !this.clientWidth) return;
    const { versions, updates, from, to } = this.picture;
    const window = { from, to, width: this.clientWidth };
    const svg = s("svg", { width: window.width, height: HEIGHT, role: "group", "aria-label": "Versions of weights over time" });
    for (const { at, x } of ticksOf(window)) {
      svg.append(s("line", { x1: x, x2: x, y1: BAR_TOP, y2: BAR_TOP + BAR_HEIGHT + 6, class: "tick" }), s("text", { x: x + 4, y: HEIGHT - 8, class: "tick-label" }, when(at, to)));
    }
    const segments = segmentsOf(versions, window);
    for (const segment of segments.sort((a, b) => a.lane - b.lane)) svg.append(this.segment(segment, to));
    for (const mark of marksOf(updates, window)) svg.append(this.mark(mark));
    this.replaceChildren(svg);
  }

  segment({ version, x, width, lane, label }, to) {
    const top = BAR_TOP + lane * LANE_SHIFT;
    const height = BAR_HEIGHT - lane * LANE_SHIFT;
    const served = duration((version.ended_at ?? to) - version.started_at);
    const group = s("g", { class: version.ended_at === null ? "version current" : "version", tabindex: 0, role: "button" });
    setData(group, "ramp", ramp(version.epoch));
    group.append(s("title", {}, `${version.weight_version}, epoch ${version.epoch}, served ${served} since ${when(version.started_at, to)}`),
      s("rect", { x, y: top, width: Math.max(1, width - 1), height, class: "fill" }), s("rect", { x, y: top, width: Math.max(1, width - 1), height: 4, class: "edge" }));
    if (label) group.append(s("text", { x: x + 6, y: top + (lane ? 16 : 18), class: "label" }, label));
    const choose = () => this.dispatchEvent(new CustomEvent("qd-version", { detail: version }));
    group.addEventListener("click", choose);
    group.addEventListener("keydown", (event) => event.key === "Enter" && choose());
    return group;
  }

  mark({ update, x }) {
    const good = update.state === "done";
    const group = s("g", { class: good ? "update" : "update bad", tabindex: 0, role: "button" });
    group.append(s("title", {}, `Update job ${update.job}: ${update.state}${update.message ? `, ${update.message}` : ""}`),
      s("path", { d: good ? `M${x - 5} 6h10l-5 8z` : `M${x - 4} 6l8 8m0-8l-8 8` }));
    const choose = () => this.dispatchEvent(new CustomEvent("qd-update", { detail: update }));
    group.addEventListener("click", choose);
    group.addEventListener("keydown", (event) => event.key === "Enter" && choose());
    return group;
  }
}

customElements.define("qd-timeline", Timeline);

/** A swatch and the name of a version, the same on every page. */
export function versionChip(version) {
  return h("span", { class: "chip" }, h("span", { class: "swatch", data: { ramp: ramp(version.epoch) } }), version.weight_version);
}
