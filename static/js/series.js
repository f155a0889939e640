// Fifteen minutes of samples, one each second, as columns for the charts. Pure.
// A sample is made by console/services/history.py: flat names such as "speed.dp0", "ttft.p95".

const WINDOW_S = 900;
const SHORTEST_S = 120;

/** Columns by name over one time axis; a name that appears later is null before. */
export class SampleWindow {
  constructor(windowS = WINDOW_S) {
    this.windowS = windowS;
    this.times = [];
    this.columns = new Map();
  }

  /** Takes what a server remembers, `{times, columns}`, unless it is less than what is here. */
  load({ times, columns }) {
    if (times.length < this.times.length) return;
    this.times = times;
    this.columns = new Map(Object.entries(columns));
  }

  /** Adds one sample; a time that is not newer than the last one is ignored. */
  push(time, values) {
    if (this.times.length && time <= this.times.at(-1)) return;
    this.times.push(time);
    for (const name of Object.keys(values)) {
      if (!this.columns.has(name)) this.columns.set(name, new Array(this.times.length - 1).fill(null));
    }
    for (const [name, column] of this.columns) column.push(values[name] ?? null);
    this._forget(time - this.windowS);
  }

  _forget(oldest) {
    const drop = this.times.findIndex((time) => time >= oldest);
    if (drop <= 0) return;
    this.times.splice(0, drop);
    for (const column of this.columns.values()) column.splice(0, drop);
  }

  /** Time range to draw: from the first sample, at least 2 minutes and at most the whole window. */
  range() {
    const now = this.times.at(-1);
    return { min: Math.max(now - this.windowS, Math.min(this.times[0], now - SHORTEST_S)), max: now };
  }

  column(name) {
    return this.columns.get(name) ?? new Array(this.times.length).fill(null);
  }

  /** The newest value of a column that is not null, or null. */
  last(name) {
    return this.column(name).at(-1) ?? null;
  }
}

/**
 * Where a group began to serve new weights: [{at, epoch, label}], once per epoch, out of the columns
 * "epoch.dp0", ...; `labels` are the snapshot's epochs. What served at the left edge is not new.
 */
export function epochMarks(window, labels) {
  const begun = new Map();
  for (const [name, column] of window.columns) {
    if (!name.startsWith("epoch.")) continue;
    let before = null;
    column.forEach((epoch, index) => {
      if (epoch === null || epoch === before) return;
      const at = window.times[index];
      if (before !== null && !(begun.get(epoch) <= at)) begun.set(epoch, at);
      before = epoch;
    });
  }
  return [...begun].map(([epoch, at]) => {
    const step = labels[epoch]?.token_step ?? null;
    return { at, epoch, label: step === null ? `epoch ${epoch}` : `step ${step}` };
  });
}
