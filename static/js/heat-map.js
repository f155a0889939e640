// <qd-heat>: a tensor folded to two dimensions, as the server thinned it out; arrows walk its cells.
//
// show({record, folded: [rows, columns], block: [rows, columns], heat: [[mean or null]]})

import { cssColour, h } from "./dom.js";
import { statistic } from "./dump-tree.js";
import { colourAt, moved, placeOf, scaleOf } from "./heat-scale.js";

const CELL_MIN_PX = 6;
const CELL_MAX_PX = 20;
const TALL_PX = 120; // a map of few rows is stretched to it
const LEGEND_STEPS = 48;

function rgb(name) {
  return cssColour(name).match(/[\d.]+/g).slice(0, 3).map(Number);
}

class HeatMap extends HTMLElement {
  connectedCallback() {
    this.canvas = h("canvas", { tabIndex: 0, role: "img" });
    this.legend = h("canvas", { class: "heat-legend", "aria-hidden": true });
    this.ends = h("div", { class: "heat-ends small dim" });
    this.readout = h("p", { class: "small dim", role: "status", "aria-live": "polite" });
    this.replaceChildren(this.canvas, this.legend, this.ends, this.readout);
    this.canvas.addEventListener("pointermove", ({ offsetX, offsetY }) => this.point([Math.floor(offsetY / this.tall), Math.floor(offsetX / this.wide)]));
    this.canvas.addEventListener("focus", () => this.point(this.at ?? [0, 0]));
    this.canvas.addEventListener("keydown", (event) => {
      const to = moved(this.at ?? [0, 0], event.key, this.size);
      if (!to) return;
      event.preventDefault();
      this.point(to);
    });
    this.onTheme = () => this.draw();
    document.addEventListener("qd-theme", this.onTheme);
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.canvas);
  }

  disconnectedCallback() {
    document.removeEventListener("qd-theme", this.onTheme);
    this.observer.disconnect();
  }

  show(view) {
    this.view = view;
    this.size = [view.heat.length, view.heat[0]?.length ?? 0];
    this.scale = scaleOf(view.heat);
    const [rows, columns] = view.block;
    const means = rows * columns > 1 ? `, each cell the mean of ${rows} × ${columns} values` : "";
    this.hint = `${view.folded.join(" × ")}${means}. Arrows walk the cells.`;
    this.canvas.setAttribute("aria-label", `Heat map, ${this.hint}`);
    this.readout.textContent = this.hint;
    this.draw();
  }

  point(at) {
    const cell = this.view?.heat[at[0]]?.[at[1]];
    if (cell === undefined) return;
    this.at = at;
    this.readout.textContent = `${placeOf(...at, this.view)}: ${cell === null ? "no finite value" : statistic(cell)}`;
    this.draw();
  }

  draw() {
    if (!this.view || !this.canvas.clientWidth) return;
    this.colours = { ground: rgb("heat-ground"), above: rgb("heat-above"), below: rgb("heat-below") };
    this.wide = this.canvas.clientWidth / this.size[1];
    this.tall = Math.min(CELL_MAX_PX, Math.max(CELL_MIN_PX, this.wide, TALL_PX / this.size[0]));
    const ctx = this.sized(this.canvas, this.tall * this.size[0]);
    this.view.heat.forEach((cells, row) => cells.forEach((cell, column) => this.fillCell(ctx, row, column, cell)));
    if (this.at) {
      ctx.strokeStyle = cssColour("text");
      ctx.lineWidth = 2;
      ctx.strokeRect(this.at[1] * this.wide, this.at[0] * this.tall, this.wide, this.tall);
    }
    this.drawLegend();
  }

  sized(canvas, height) {
    canvas.style.height = `${height}px`;
    canvas.width = canvas.clientWidth * devicePixelRatio;
    canvas.height = height * devicePixelRatio;
    const ctx = canvas.getContext("2d");
    ctx.scale(devicePixelRatio, devicePixelRatio);
    return ctx;
  }

  fillCell(ctx, row, column, cell) {
    ctx.fillStyle = cell === null ? cssColour("bad-mark") : `rgb(${colourAt(cell, this.scale, this.colours).join(" ")})`;
    const [x, y] = [Math.floor(column * this.wide), Math.floor(row * this.tall)];
    ctx.fillRect(x, y, Math.ceil((column + 1) * this.wide) - x, Math.ceil((row + 1) * this.tall) - y);
  }

  drawLegend() {
    const { scale } = this;
    this.legend.hidden = !scale;
    this.ends.replaceChildren();
    if (!scale) return;
    const ctx = this.sized(this.legend, 8);
    const wide = this.legend.clientWidth / LEGEND_STEPS;
    for (let step = 0; step < LEGEND_STEPS; step += 1) {
      const value = scale.low + ((scale.high - scale.low) * step) / (LEGEND_STEPS - 1);
      ctx.fillStyle = `rgb(${colourAt(value, scale, this.colours).join(" ")})`;
      ctx.fillRect(step * wide, 0, Math.ceil(wide), 8);
    }
    const marks = scale.signed ? [scale.low, 0, scale.high] : [scale.low, scale.high];
    this.ends.append(...marks.map((mark) => h("span", {}, statistic(mark))));
    if (this.view.heat.flat().includes(null)) this.ends.append(h("span", { class: "heat-none" }, h("span", { class: "swatch" }), "no finite value"));
  }
}

customElements.define("qd-heat", HeatMap);
