// <qd-retention kind>: what a kind of recordings holds of the disk quota, and what goes when it is full.
//
// GET /api/disk -> {quota_bytes, used_bytes, free_bytes, kinds: {profiles: {bytes, items, pinned}, ...}}

import { get } from "./api.js";
import { fill } from "./dom.js";
import { retentionWords } from "./recording-words.js";

class Retention extends HTMLElement {
  connectedCallback() {
    this.refresh();
  }

  async refresh() {
    try {
      const words = retentionWords(await get("/api/disk"), this.getAttribute("kind"));
      fill(this, words);
      const meter = this.querySelector(".meter");
      meter.firstElementChild.style.width = `${Math.min(100, 100 * words.share)}%`;
      meter.dataset.tone = words.share > 0.9 ? "warn" : "";
      this.firstElementChild.hidden = false;
    } catch (error) {
      this.firstElementChild.hidden = false;
      fill(this, { held: "", quota: `The disk's use cannot be read: ${error.message}` });
    }
  }
}

customElements.define("qd-retention", Retention);
