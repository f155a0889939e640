// <qd-lanes>: a trace as lanes per rank on a canvas; the server thins it out to what can be seen.
//
// GET url?from&to&pixels -> {from, to, begin, end, names: [name], lanes: [{label, rows: [[start, duration, name, count]]}]}
// times in microseconds; begin..end is the whole trace; `count` > 1: so many events drawn as one.

import { get } from "./api.js";
import { cssColour, fill, h, icon } from "./dom.js";
import { hueOf, micros, zoomed } from "./lane-math.js";

const LANE_PX = 28;
const LABEL_PX = 120;
const AXIS_PX = 24;
const ZOOM = 1.4;
const FETCH_WAIT_MS = 120;

class Lanes extends HTMLElement {
  connectedCallback() {
    this.canvas = h("canvas", { tabIndex: 0, role: "img", "aria-label": "Lanes per rank; W and S zoom, A and D move. A table of operations stands below." });
    this.readout = h("div", { class: "lane-readout small dim" }, "W and S zoom, A and D move, drag to pan");
    this.append(h("header", {}, h("h2", {}, "Timeline"), h("span", { class: "small faint", data: { f: "window" } }),
      h("button", { type: "button", class: "button quiet only push", title: "Zoom in (W)", onclick: () => this.zoom(ZOOM) }, icon("plus"), h("span", { class: "sr" }, "Zoom in")),
      h("button", { type: "button", class: "button quiet", title: "Whole trace (0)", onclick: () => this.whole() }, "Whole trace")), this.canvas, this.readout);
    this.canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    this.canvas.addEventListener("pointermove", (event) => this.onMove(event));
    this.canvas.addEventListener("pointerdown", (event) => this.canvas.setPointerCapture(event.pointerId));
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
    document.addEventListener("qd-theme", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    this.load();
  }

  async load() {
    const { from, to } = this.view ?? {};
    const query = from === undefined ? "" : `&from=${Math.floor(from)}&to=${Math.ceil(to)}`;
    try {
      this.trace = await get(`${this.getAttribute("src")}?pixels=${Math.max(200, this.canvas.clientWidth - LABEL_PX)}${query}`);
      this.view ??= { from: this.trace.begin, to: this.trace.end };
      this.draw();
    } catch (error) {
      this.readout.textContent = `The timeline cannot be read: ${error.message}`;
    }
  }

  loadSoon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.load(), FETCH_WAIT_MS);
  }

  setView(view) {
    this.view = view;
    this.draw();
    this.loadSoon();
  }

  whole() {
    if (this.trace) this.setView({ from: this.trace.begin, to: this.trace.end });
  }

  zoom(factor, at = (this.view.from + this.view.to) / 2) {
    const { begin, end } = this.trace;
    this.setView(zoomed({ ...this.view, begin, end }, factor, at));
  }

  pan(us) {
    const { begin, end } = this.trace;
    const span = this.view.to - this.view.from;
    const from = Math.min(Math.max(begin, this.view.from + us), end - span);
    this.setView({ from, to: from + span });
  }

  timeAt(x) {
    const { from, to } = this.view;
    return from + ((x - LABEL_PX) * (to - from)) / (this.canvas.clientWidth - LABEL_PX);
  }

  onWheel(event) {
    if (!this.trace || !(event.ctrlKey || event.shiftKey)) return; // plain wheel scrolls the page
    event.preventDefault();
    this.zoom(event.deltaY < 0 ? ZOOM : 1 / ZOOM, this.timeAt(event.offsetX));
  }

  onKey(event) {
    if (!this.trace) return;
    const span = this.view.to - this.view.from;
    const act = { w: () => this.zoom(ZOOM), s: () => this.zoom(1 / ZOOM), a: () => this.pan(-span / 5), d: () => this.pan(span / 5), 0: () => this.whole() }[event.key.toLowerCase()];
    if (!act || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    act();
  }

  onMove(event) {
    if (!this.trace) return;
    if (event.buttons === 1) {
      this.pan((-event.movementX * (this.view.to - this.view.from)) / (this.canvas.clientWidth - LABEL_PX));
      return;
    }
    const lane = this.trace.lanes[Math.floor((event.offsetY - AXIS_PX) / LANE_PX)];
    const at = this.timeAt(event.offsetX);
    const row = lane?.rows.find(([start, length]) => at >= start && at <= start + length);
    this.readout.textContent = row ? `${lane.label} · ${this.trace.names[row[2]]} · ${micros(row[1])} · at ${micros(row[0] - this.trace.begin)}${row[3] > 1 ? ` · ${row[3]} events` : ""}` : " ";
  }

  draw() {
    if (!this.trace || !this.canvas.clientWidth) return;
    const width = this.canvas.clientWidth;
    const height = AXIS_PX + this.trace.lanes.length * LANE_PX;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = width * devicePixelRatio;
    this.canvas.height = height * devicePixelRatio;
    const ctx = this.canvas.getContext("2d");
    ctx.scale(devicePixelRatio, devicePixelRatio);
    const colours = { line: cssColour("line"), text: cssColour("text"), faint: cssColour("text-3"), ops: [1, 2, 3, 4].map((place) => cssColour(`chart-${place}`)), ground: cssColour("surface") };
    this.drawAxis(ctx, width, height, colours);
    this.trace.lanes.forEach((lane, index) => this.drawLane(ctx, lane, AXIS_PX + index * LANE_PX, width, colours));
    fill(this, { window: `${micros(this.view.from - this.trace.begin)} to ${micros(this.view.to - this.trace.begin)} of ${micros(this.trace.end - this.trace.begin)}` });
  }

  drawAxis(ctx, width, height, colours) {
    const { from, to } = this.view;
    const usable = width - LABEL_PX;
    const raw = ((to - from) * 100) / usable;
    const unit = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((times) => times * unit).find((size) => size >= raw);
    ctx.font = "11px sans-serif";
    ctx.fillStyle = colours.faint;
    ctx.strokeStyle = colours.line;
    const { begin } = this.trace;
    for (let at = begin + Math.ceil((from - begin) / step) * step; at <= to; at += step) {
      const x = Math.round(LABEL_PX + ((at - from) * usable) / (to - from)) + 0.5;
      ctx.beginPath();
      ctx.moveTo(x, AXIS_PX - 6);
      ctx.lineTo(x, height);
      ctx.stroke();
      ctx.fillText(micros(at - begin), x + 3, 14);
    }
  }

  drawLane(ctx, lane, top, width, colours) {
    const { from, to } = this.view;
    const scale = (width - LABEL_PX) / (to - from);
    ctx.save();
    ctx.beginPath();
    ctx.rect(LABEL_PX, top, width - LABEL_PX, LANE_PX);
    ctx.clip();
    for (const [start, length, name] of lane.rows) {
      const x = LABEL_PX + (start - from) * scale;
      const wide = Math.max(1, length * scale - 0.5);
      if (x > width || x + wide < LABEL_PX) continue;
      ctx.fillStyle = colours.ops[hueOf(this.trace.names[name])];
      ctx.fillRect(x, top + 4, wide, LANE_PX - 8);
      if (wide > 48) {
        ctx.fillStyle = colours.ground;
        ctx.fillText(this.trace.names[name].slice(0, Math.floor(wide / 7)), Math.max(x, LABEL_PX) + 4, top + 18);
      }
    }
    ctx.restore();
    ctx.fillStyle = colours.text;
    ctx.fillText(lane.label, 12, top + 18);
    ctx.strokeStyle = colours.line;
    ctx.strokeRect(-1, top + 0.5, width + 2, LANE_PX);
  }
}

customElements.define("qd-lanes", Lanes);
