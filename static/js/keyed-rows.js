// Rows that stay where they are: values change in place, and rows join or leave only while the
// pointer is elsewhere; until then "3 new" waits above the table and what left is greyed.

import { h } from "./dom.js";
import { plural } from "./format.js";

export class KeyedRows {
  /** `make(item)` gives a row, `update(row, item)` fills it, `keyOf(item)` names it. */
  constructor(table, { keyOf, make, update, noun = "row" }) {
    Object.assign(this, { table, keyOf, make, update, noun });
    this.body = table.tBodies[0];
    this.rows = new Map();
    this.held = [];
    this.pointerInside = false;
    this.more = h("button", { type: "button", class: "pending", hidden: true, onclick: () => this.release() });
    table.before(this.more);
    table.addEventListener("pointerenter", () => { this.pointerInside = true; });
    table.addEventListener("pointerleave", () => { this.pointerInside = false; this.release(); });
  }

  /** Shows `items`; order of known rows never changes, new ones stand where their item does. */
  show(items) {
    this.order = items.map(this.keyOf);
    const keys = new Set();
    const fresh = [];
    for (const item of items) {
      const key = this.keyOf(item);
      keys.add(key);
      const row = this.rows.get(key);
      if (row) this.update(row, item);
      else fresh.push(item);
    }
    for (const [key, row] of this.rows) row.classList.toggle("gone", !keys.has(key));
    this.held = fresh;
    if (!this.pointerInside || !this.rows.size) this.release();
    this.more.hidden = !this.held.length;
    this.more.textContent = `${this.held.length} new ${plural(this.held.length, this.noun).split(" ").slice(1).join(" ")}: show`;
  }

  /** Lets waiting rows in and removes those that left. */
  release() {
    for (const [key, row] of this.rows) {
      if (!row.classList.contains("gone")) continue;
      row.remove();
      this.rows.delete(key);
    }
    for (const item of this.held) {
      const row = this.make(item);
      this.update(row, item);
      this.rows.set(this.keyOf(item), row);
    }
    for (const item of this.held.toReversed()) {
      const key = this.keyOf(item);
      const follower = this.order.slice(this.order.indexOf(key) + 1).find((one) => this.rows.get(one)?.isConnected);
      this.body.insertBefore(this.rows.get(key), this.rows.get(follower) ?? null);
    }
    this.held = [];
    this.more.hidden = true;
  }
}
