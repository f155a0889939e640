// The list at the left of the playground: search, rename, export, delete.

import { get, request } from "./api.js";
import { fill, fromTemplate, jsonScript } from "./dom.js";
import { whenShort } from "./format.js";
import { addCommands } from "./palette.js";
import { askText, confirmDanger } from "./prompts.js";

const SEARCH_WAIT_MS = 200;
const PAGE_SIZE = 50; // of the server

export class ConversationList {
  constructor(box, currentId) {
    this.box = box;
    this.list = box.querySelector("ul");
    this.search = box.querySelector("input");
    this.more = box.querySelector("#more-conversations");
    this.items = jsonScript("conversations-data");
    this.next = this.items.length >= PAGE_SIZE ? this.items.length : null; // offset of the older ones
    this.currentId = currentId;
    this.search.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.load(0), SEARCH_WAIT_MS);
    });
    this.more.addEventListener("click", () => this.load(this.next));
    addCommands(() => this.items.map(({ id, title }) => ({
      label: title, kind: "Conversation", icon: "playground", run: () => { location.href = `/playground/${id}/`; },
    })));
    this.draw();
  }

  async load(offset) {
    const words = this.search.value.trim();
    await this.attempt(async () => {
      const found = await get(`/api/conversations?q=${encodeURIComponent(words)}&offset=${offset}`);
      if (words !== this.search.value.trim()) return;
      this.items = offset ? [...this.items, ...found.conversations] : found.conversations;
      this.next = found.next;
    });
  }

  /** A conversation that has just begun, or got a new message: to the top. */
  touch(id, title) {
    const known = this.items.find((item) => item.id === id);
    const item = { id, title: known?.title ?? title, updated_at: Date.now() / 1000 };
    this.items = [item, ...this.items.filter((one) => one.id !== id)];
    this.draw();
  }

  setCurrent(id) {
    this.currentId = id;
    this.draw();
  }

  draw() {
    this.list.replaceChildren(...this.items.map((item) => this.row(item)));
    this.more.hidden = this.next === null;
    if (this.items.length) this.say("");
    else this.say(this.search.value ? "Nothing matches." : "No conversation yet. What you send is kept here.");
  }

  row(item) {
    const row = fromTemplate("conversation-row");
    const link = row.querySelector("a");
    link.href = `/playground/${item.id}/`;
    link.title = item.title;
    if (item.id === this.currentId) link.setAttribute("aria-current", "page");
    fill(row, { title: item.title, when: whenShort(item.updated_at) });
    row.querySelector("[data-do=rename]").addEventListener("click", () => this.rename(item));
    row.querySelector("[data-do=delete]").addEventListener("click", () => this.remove(item));
    for (const form of ["md", "json"]) row.querySelector(`[data-export=${form}]`).href = `/api/conversations/${item.id}/export?format=${form}`;
    return row;
  }

  async rename(item) {
    const title = await askText("Rename conversation", "Title", item.title, "Rename");
    if (!title || title === item.title) return;
    await this.attempt(async () => {
      await request("PATCH", `/api/conversations/${item.id}`, { title });
      item.title = title;
    });
  }

  async remove(item) {
    const sure = await confirmDanger("Delete conversation", `"${item.title}" and all its answers are deleted for good.`, "Delete conversation");
    if (!sure) return;
    await this.attempt(async () => {
      await request("DELETE", `/api/conversations/${item.id}`);
      this.items = this.items.filter((one) => one.id !== item.id);
      if (item.id === this.currentId) location.href = "/playground/";
    });
  }

  async attempt(work) {
    try {
      await work();
      this.draw();
    } catch (error) {
      this.say(error.message);
    }
  }

  say(text) {
    const note = this.box.querySelector(".list-note");
    note.textContent = text;
    note.hidden = !text;
  }
}
