// Jobs as they go on: one /ws/jobs/ subscription, opened when the first listener asks for it.
//
// Frames: {type: "jobs", jobs: [job]} at first, then {type: "job", job} whenever one changed. A job is
// {id, kind, title, state, message, progress (0..1 or null), ranks: [{dp, tp, state, message}],
//  actor, created_at, ended_at} with times in Unix seconds.

import { get } from "./api.js";
import { LiveSocket } from "./socket.js";

const ENDED = new Set(["done", "partial", "failed", "refused", "cancelled"]);

const TONES = { done: "ok", queued: "info", sent: "info", running: "info", prepared: "info", committed: "info", partial: "warn", cancelled: "warn" };

/** ok, info, warn or bad for a job's or a rank's state. */
export function jobTone(state) {
  return TONES[state] ?? "bad";
}

export function hasEnded(job) {
  return ENDED.has(job.state);
}

/** Events: "job" with the job in `detail`. */
class JobsFeed extends EventTarget {
  watch() {
    if (this.socket) return;
    this.socket = new LiveSocket("/ws/jobs/");
    this.socket.addEventListener("frame", ({ detail: frame }) => {
      for (const job of frame.type === "jobs" ? frame.jobs : frame.type === "job" ? [frame.job] : []) this._tell(job);
    });
  }

  /** Reads a job over HTTP: a hint may have been lost, the row is the truth. */
  async read(id) {
    const { job } = await get(`/api/jobs/${id}`);
    this._tell(job);
    return job;
  }

  _tell(job) {
    this.dispatchEvent(new CustomEvent("job", { detail: job }));
  }
}

export const jobsFeed = new JobsFeed();
