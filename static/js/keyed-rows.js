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
    this.order = []; // keys of the newest items
    this.pointerInside = false;
    this.more = h("button", { type: "button", class: "pending", hidden: true, onclick: () => this.release() });
    table.before(this.more);
    table.addEventListener("pointerenter", () => { this.pointerInside = true; });
    table.addEventListener("pointerleave", () => { this.pointerInside = false; this.release(); });
  }

  /** Shows `items`; known rows stay where they are, new ones come before what follows them there. */
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
      if (row.contains(document.activeElement)) (row.nextElementSibling ?? row.previousElementSibling)?.focus();
      row.remove();
      this.rows.delete(key);
    }
    for (const item of this.held) {
      const row = this.make(item);
      this.update(row, item);
      const key = this.keyOf(item);
      const next = this.order.slice(this.order.indexOf(key) + 1).find((one) => this.rows.has(one));
      this.body.insertBefore(row, this.rows.get(next) ?? null);
      this.rows.set(key, row);
    }
    this.held = [];
    this.more.hidden = true;
  }
}
