// A table that the server pages and filters: search form above, "Show more" below, rows kept in place.

import { get } from "./api.js";
import { fill } from "./dom.js";
import { KeyedRows } from "./keyed-rows.js";

const SEARCH_WAIT_MS = 200;

export class FilteredList {
  /**
   * `box` holds form.filters, table.data, .empty, .more and .notice; GET `url`?filters&offset gives
   * {[name]: [item], next: offset or null}. `make`, `update`, `keyOf` and `noun` as in KeyedRows.
   */
  constructor(box, { url, name, ...rowOptions }) {
    Object.assign(this, { box, url, name });
    this.form = box.querySelector("form.filters");
    this.table = box.querySelector("table.data");
    this.rowOptions = rowOptions;
    this.items = [];
    this.next = null;
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.restart(), SEARCH_WAIT_MS);
    });
    box.querySelector(".more").addEventListener("click", () => this.load(this.next));
    const asked = new URLSearchParams(location.search);
    for (const field of this.form.elements) {
      if (!field.name || !asked.has(field.name)) continue;
      if (field.type === "checkbox") field.checked = asked.get(field.name) === field.value;
      else field.value = asked.get(field.name);
    }
    this.restart();
  }

  /** New filters: a new list, and an address that can be shared. */
  restart() {
    this.table.tBodies[0].replaceChildren();
    this.rows?.more.remove();
    this.rows = new KeyedRows(this.table, this.rowOptions);
    this.items = [];
    const query = this.query();
    history.replaceState(null, "", query ? `?${query}` : location.pathname);
    return this.load(0);
  }

  query() {
    const filled = [...new FormData(this.form)].filter(([, value]) => value !== "");
    return new URLSearchParams(filled).toString();
  }

  async load(offset) {
    const query = this.query();
    const problem = this.box.querySelector(".notice");
    try {
      const found = await get(`${this.url}?${query}${query ? "&" : ""}offset=${offset}`);
      if (query !== this.query()) return;
      this.items = offset ? [...this.items, ...found[this.name]] : found[this.name];
      this.next = found.next;
      problem.hidden = true;
      this.found = found;
    } catch (error) {
      problem.hidden = false;
      fill(problem, { text: `The list cannot be read: ${error.message}` });
    }
    this.draw();
  }

  /** An item that changed or is new; it takes its place without a reload. */
  put(item) {
    const at = this.items.findIndex((one) => this.rowOptions.keyOf(one) === this.rowOptions.keyOf(item));
    if (at < 0) this.items = [item, ...this.items];
    else this.items[at] = item;
    this.draw();
  }

  draw() {
    this.rows.show(this.items);
    this.table.hidden = !this.items.length;
    const filtered = this.query() !== "";
    this.box.querySelector(".empty").hidden = this.items.length > 0 || filtered;
    this.box.querySelector(".nothing").hidden = this.items.length > 0 || !filtered;
    this.box.querySelector(".more").hidden = this.next === null;
  }
}
