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
    this.list.addEventListener("keydown", (event) => this.onKey(event));
    document.addEventListener("click", (event) => this.closeMenus(event.target));
    addCommands(() => this.commands());
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

  /** What can be done to the conversation that is open. */
  commands() {
    const item = this.items.find(({ id }) => id === this.currentId);
    if (!item) return [];
    const command = (label, name, run) => ({ label, kind: "Conversation", icon: name, run });
    return [
      command("Rename this conversation", "pencil", () => this.rename(item)),
      command("Export this conversation as Markdown", "download", () => { location.href = exportUrl(item, "md"); }),
      command("Export this conversation as JSON", "download", () => { location.href = exportUrl(item, "json"); }),
      command("Delete this conversation", "trash", () => this.remove(item)),
    ];
  }

  /** On a row: F2 renames, Delete deletes, arrows walk; Esc closes its menu. */
  onKey(event) {
    const row = event.target.closest("li");
    const item = this.items[[...this.list.children].indexOf(row)];
    const menu = row.querySelector("details");
    if (event.key === "Escape" && menu.open) {
      menu.open = false;
      menu.querySelector("summary").focus();
      event.stopPropagation();
    } else if (event.key === "F2") this.rename(item);
    else if (event.key === "Delete") this.remove(item);
    else if (event.key === "ArrowDown") row.nextElementSibling?.querySelector("a").focus();
    else if (event.key === "ArrowUp") row.previousElementSibling?.querySelector("a").focus();
    else return;
    event.preventDefault();
  }

  closeMenus(clicked) {
    for (const menu of this.list.querySelectorAll("details[open]")) if (!menu.contains(clicked)) menu.open = false;
  }

  /** Rows are made anew; who was in one of them stays there, or in the row that took its place. */
  draw() {
    const at = [...this.list.children].findIndex((row) => row.contains(document.activeElement));
    this.list.replaceChildren(...this.items.map((item) => this.row(item)));
    if (at >= 0) (this.list.children[Math.min(at, this.items.length - 1)]?.querySelector("a") ?? this.search).focus();
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
    fill(row, { title: item.title, when: whenShort(item.updated_at), menu: `Rename, export or delete "${item.title}"` });
    row.querySelector("[data-do=rename]").addEventListener("click", () => this.rename(item));
    row.querySelector("[data-do=delete]").addEventListener("click", () => this.remove(item));
    for (const form of ["md", "json"]) row.querySelector(`[data-export=${form}]`).href = exportUrl(item, form);
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

function exportUrl(item, form) {
  return `/api/conversations/${item.id}/export?format=${form}`;
}
