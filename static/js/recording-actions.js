// What can be done with a profile or a dump that is there: pin it against the disk quota, delete it.

import { request } from "./api.js";
import { fill } from "./dom.js";
import { confirmDanger } from "./prompts.js";

function complain(text) {
  const problem = document.querySelector("main .notice[role=alert]");
  fill(problem, { text });
  problem.hidden = false;
}

/** Wires the pin inside `box`. `current()` gives the item, `changed(item)` takes the new one. */
export function startPin(box, current, name, changed) {
  box.querySelector("[data-do=pin]")?.addEventListener("click", async (event) => {
    event.stopPropagation();
    const item = current();
    try {
      const answer = await request("PATCH", `/api/${name}s/${item.id}`, { pinned: !item.pinned });
      changed({ ...item, ...answer[name] });
    } catch (error) {
      complain(`It was not changed: ${error.message}`);
    }
  });
}

/** Shows whether it is pinned. */
export function showPin(box, { pinned }) {
  const button = box.querySelector("[data-do=pin]");
  if (!button) return;
  button.setAttribute("aria-pressed", String(pinned));
  button.title = pinned ? "Pinned: the disk quota leaves it alone" : "Pin: the disk quota will leave it alone";
}

/** Pin and delete of a page of one recording. */
export function startRecordingActions(current, name, changed) {
  const box = document.getElementById("recording-actions");
  startPin(box, current, name, changed);
  box.querySelector("[data-do=delete]")?.addEventListener("click", async () => {
    const { id } = current();
    if (!(await confirmDanger(`Delete ${id}?`, "Its files are deleted with it. This cannot be undone.", "Delete"))) return;
    try {
      await request("DELETE", `/api/${name}s/${id}`);
      location.href = `/${name}s/`;
    } catch (error) {
      complain(`It was not deleted: ${error.message}`);
    }
  });
}
