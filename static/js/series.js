// Fifteen minutes of samples, one each second, as columns for the charts. Pure.

import { isLoaded } from "./fleet-state.js";

const WINDOW_S = 900;
const SHORTEST_S = 120;

/** Nearest-rank percentile of numbers; null of none. */
export function percentile(values, share) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.max(0, Math.ceil(share * sorted.length) - 1))];
}

/** Columns by name over one time axis; a name that appears later is null before. */
export class SampleWindow {
  constructor(windowS = WINDOW_S) {
    this.windowS = windowS;
    this.times = [];
    this.columns = new Map();
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

/** One sample out of a FleetSnapshot: flat names such as "speed.dp0", "kv.dp1", "running". */
export function sampleOf(snapshot) {
  const sample = { running: 0, waiting: 0, speed: 0 };
  for (const rank of snapshot.ranks) {
    if (rank.tp !== 0) continue;
    sample[`speed.dp${rank.dp}`] = rank.tokens_per_s;
    sample[`kv.dp${rank.dp}`] = rank.kv_total ? (100 * rank.kv_used) / rank.kv_total : 0;
    sample.speed += rank.tokens_per_s;
    sample.running += rank.running;
    sample.waiting += rank.waiting;
  }
  return sample;
}

/** Step times (ms) of the last `spanS` seconds over all ranks: p50 and p99. */
export class StepTimes {
  constructor(spanS = 30) {
    this.spanS = spanS;
    this.seen = [];
  }

  push(snapshot) {
    for (const rank of snapshot.ranks) {
      if (rank.tp === 0 && rank.running > 0) this.seen.push([snapshot.at, rank.step_s * 1000]);
    }
    const oldest = snapshot.at - this.spanS;
    while (this.seen.length && this.seen[0][0] < oldest) this.seen.shift();
    const values = this.seen.map(([, ms]) => ms);
    return { "step.p50": percentile(values, 0.5), "step.p99": percentile(values, 0.99) };
  }
}

/** Epoch changes between two snapshots: [{at, epoch, label}] once per new epoch. */
export function newEpochs(before, after) {
  if (!before) return [];
  const known = new Set(before.ranks.map((rank) => rank.epoch));
  const marks = new Map();
  for (const rank of after.ranks.filter(isLoaded)) {
    if (known.has(rank.epoch)) continue;
    const step = rank.token_step ?? null;
    marks.set(rank.epoch, { at: after.at, epoch: rank.epoch, label: step === null ? `epoch ${rank.epoch}` : `step ${step}` });
  }
  return [...marks.values()];
}
