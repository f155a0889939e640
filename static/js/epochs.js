// What the epochs of weights were called: out of the fleet feed, else asked for once.

import { get } from "./api.js";
import { feed } from "./feed.js";
import { stepName } from "./format.js";

/** Event "change": a step that was asked for is known now. */
class Epochs extends EventTarget {
  constructor() {
    super();
    this.known = new Map(); // epoch -> promise of its lineage
    this.steps = new Map(); // epoch -> trainer step or null
    feed.addEventListener("change", () => this._note());
    this._note();
  }

  _note() {
    for (const rank of feed.snapshot?.ranks ?? []) this.steps.set(rank.epoch, rank.token_step);
  }

  /** Lineage of an epoch; raises ApiError. A failure is not remembered. */
  lineage(epoch) {
    if (!this.known.has(epoch)) {
      const asked = get(`/api/epochs/${epoch}`);
      asked.catch(() => this.known.delete(epoch));
      this.known.set(epoch, asked);
    }
    return this.known.get(epoch);
  }

  /** Asks for the step of an epoch that no rank serves any more. */
  async look(epoch) {
    this.steps.set(epoch, null);
    try {
      this.steps.set(epoch, (await this.lineage(epoch)).token_step);
      this.dispatchEvent(new Event("change"));
    } catch {
      return; // the epoch keeps its number as its name
    }
  }
}

export const epochs = new Epochs();

/** "step 1042", or "epoch 41" while the step is unknown or there is none. */
export function stepOf(epoch) {
  if (epoch !== undefined && feed.snapshot && !epochs.steps.has(epoch)) epochs.look(epoch);
  return stepName(epochs.steps.get(epoch), epoch);
}
