// <qd-chart>: one uPlot panel with legend, shared cursor, weight marks and a table behind it.

import uPlot from "../vendor/uplot/uPlot.esm.js";
import { cssColour, h, icon } from "./dom.js";
import { clock } from "./format.js";

const HEIGHT = 160;
const TABLE_EVERY_S = 30;
const cursorSync = uPlot.sync("fleet");

/**
 * `define({series, window, max, floor})`: series is [{name, label, colour, dashed, bandTo}], where
 * `bandTo` names the series this one is the upper edge over; `max` fixes the top of the scale, `floor` is
 * the least it may be. `refresh(marks)` draws the newest samples and `marks`, [{at, epoch, label}].
 */
class Chart extends HTMLElement {
  connectedCallback() {
    this.unit = this.dataset.unit;
    this.marks = [];
    this.legend = h("span", { class: "legend", "aria-hidden": "true" });
    this.plotBox = h("div", { class: "plot waiting" }, "Waiting for the first samples");
    this.behind = h("div", { class: "behind", hidden: true });
    const toggle = h("button", { type: "button", class: "button quiet only push", title: "Show as table", "aria-pressed": "false", onclick: () => this.toggleTable(toggle) },
      icon("table"), h("span", { class: "sr" }, `Show ${this.dataset.title} as a table`));
    this.append(h("header", {}, h("h2", {}, this.dataset.title), h("span", { class: "unit" }, this.unit), this.legend, toggle), this.plotBox, this.behind);
    this.plotBox.setAttribute("role", "img");
    document.addEventListener("qd-theme", () => this.rebuild());
    new ResizeObserver(() => this.plot?.setSize({ width: this.plotBox.clientWidth, height: HEIGHT })).observe(this.plotBox);
  }

  define({ series, window, max = null, floor = 1 }) {
    this.window = window;
    this.max = max;
    this.floor = floor;
    this.series = series;
    this.rebuild();
  }

  rebuild() {
    this.plot?.destroy();
    this.plot = null;
    if (this.window) this.refresh();
  }

  refresh(marks = this.marks) {
    this.marks = marks;
    if (!this.window || this.window.times.length < 2) return;
    const columns = this.series.map(({ name }) => this.window.column(name));
    if (!this.plot) this.build();
    this.plot.setData([this.window.times, ...columns], false);
    this.plot.batch(() => {
      this.plot.setScale("x", this.window.range());
      this.plot.setScale("y", { min: 0, max: this.top(columns) });
    });
    this.drawLegend(this.plot.cursor.idx);
    if (!this.behind.hidden) this.drawTable();
    this.plotBox.setAttribute("aria-label", this.inWords());
  }

  top(columns) {
    if (this.max !== null) return this.max;
    let top = this.floor / 1.1;
    for (const column of columns) for (const value of column) if (value > top) top = value;
    return top * 1.1;
  }

  build() {
    this.plotBox.classList.remove("waiting");
    this.plotBox.replaceChildren();
    const faint = cssColour("text-3");
    const axis = { stroke: faint, font: "11px sans-serif", grid: { stroke: cssColour("chart-grid"), width: 1 }, ticks: { show: false } };
    const series = this.series.map(({ label, colour, dashed }) => ({
      label, stroke: cssColour(colour), width: 1.5, dash: dashed ? [4, 3] : undefined, points: { show: false }, spanGaps: false,
    }));
    const bands = this.series.flatMap(({ bandTo, colour }, index) => (bandTo
      ? [{ series: [index + 1, 1 + this.series.findIndex(({ name }) => name === bandTo)], fill: faded(cssColour(colour)) }] : []));
    this.plot = new uPlot({
      width: this.plotBox.clientWidth, height: HEIGHT, legend: { show: false }, bands,
      cursor: { sync: { key: cursorSync.key, setSeries: false }, drag: { x: false, y: false }, y: false, points: { size: 5 } },
      scales: { x: { time: true, auto: false }, y: { auto: false } },
      axes: [{ ...axis, space: 90, size: 24, values: (_, ticks, _axis, _space, step) => ticks.map((tick) => (step < 60 ? clock(tick) : clock(tick).slice(0, 5))) }, { ...axis, size: 48, space: 36 }],
      series: [{}, ...series],
      hooks: { setCursor: [(plot) => this.drawLegend(plot.cursor.idx)], draw: [(plot) => this.drawMarks(plot)] },
    }, [[], ...this.series.map(() => [])], this.plotBox);
  }

  drawMarks(plot) {
    const { ctx, bbox } = plot;
    const scale = devicePixelRatio;
    ctx.save();
    ctx.font = `${10 * scale}px sans-serif`;
    ctx.lineWidth = scale;
    ctx.setLineDash([2 * scale, 2 * scale]);
    for (const { at, epoch, label } of this.marks) {
      const x = Math.round(plot.valToPos(at, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      const colour = cssColour(`v${epoch % 8}`);
      ctx.strokeStyle = colour;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.fillStyle = cssColour("text-2");
      const onLeft = x + ctx.measureText(label).width + 8 * scale > bbox.left + bbox.width;
      ctx.textAlign = onLeft ? "right" : "left";
      ctx.fillText(label, x + (onLeft ? -4 : 4) * scale, bbox.top + 10 * scale);
    }
    ctx.restore();
  }

  valueAt(name, index) {
    const column = this.window.column(name);
    return column[index ?? column.length - 1] ?? null;
  }

  drawLegend(index) {
    this.legend.replaceChildren(...this.series.map(({ name, label, colour, dashed, bandTo }) => {
      const mark = h("i", { class: bandTo ? "band" : dashed ? "dashed" : "" });
      mark.style.setProperty("--mark", `var(--${colour})`);
      return h("span", {}, mark, label, h("b", {}, number(this.valueAt(name, index))));
    }));
  }

  inWords() {
    const values = this.series.map(({ name, label }) => `${label} ${number(this.valueAt(name, null))}`);
    return `${this.dataset.title} ${this.unit}, now: ${values.join(", ")}`;
  }

  toggleTable(toggle) {
    this.behind.hidden = !this.behind.hidden;
    this.plotBox.hidden = !this.behind.hidden;
    toggle.setAttribute("aria-pressed", String(!this.behind.hidden));
    if (!this.behind.hidden) this.drawTable();
    else this.refresh();
  }

  drawTable() {
    if (!this.window?.times.length) {
      this.behind.replaceChildren(h("p", { class: "empty small" }, "No samples yet."));
      return;
    }
    const rows = [];
    let last = Infinity;
    for (let index = this.window.times.length - 1; index >= 0; index -= 1) {
      if (last - this.window.times[index] < TABLE_EVERY_S) continue;
      last = this.window.times[index];
      rows.push(h("tr", {}, h("td", {}, clock(last)), ...this.series.map(({ name }) => h("td", { class: "num" }, number(this.valueAt(name, index))))));
    }
    this.behind.replaceChildren(h("table", { class: "data" },
      h("caption", { class: "sr" }, `${this.dataset.title}, ${this.unit}, every ${TABLE_EVERY_S} s`),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Time"), ...this.series.map(({ label }) => h("th", { class: "num", scope: "col" }, label)))),
      h("tbody", {}, ...rows)));
  }
}

function number(value) {
  if (value === null) return "–";
  return value >= 100 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1);
}

function faded(colour) {
  return colour.replace("rgb(", "rgba(").replace(")", ", 0.18)");
}

customElements.define("qd-chart", Chart);

/** Draws a line of numbers into a small canvas; the newest at the right edge of `slots` slots. */
export function drawSpark(canvas, values, slots) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const scale = devicePixelRatio;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const ctx = canvas.getContext("2d");
  ctx.scale(scale, scale);
  const top = Math.max(1, ...values);
  const x = (index) => width - ((values.length - 1 - index) * width) / (slots - 1);
  const y = (value) => height - 1.5 - (value / top) * (height - 4);
  ctx.beginPath();
  values.forEach((value, index) => ctx.lineTo(x(index), y(value ?? 0)));
  ctx.strokeStyle = cssColour("accent");
  ctx.lineWidth = 1.25;
  ctx.stroke();
  ctx.lineTo(width, height);
  ctx.lineTo(x(0), height);
  ctx.fillStyle = faded(cssColour("accent"));
  ctx.fill();
}
