// Dumps: the library; two chosen dumps are compared.
//
// GET /api/dumps?q&state&pinned&offset -> {dumps: [{id, created_at, state, message, rids: [rid], tensors, bytes, epoch,
//   token_step, form, missing: [rank], pinned, expired, note, actor}], next}
// state: capturing | ready | partial | failed; expired: its files made room for others

import "./point-tree.js";
import "./retention.js";
import { openAction, startActions } from "./action-sheet.js";
import { ChosenPair } from "./chosen-pair.js";
import { fill, fromTemplate, setData } from "./dom.js";
import { FilteredList } from "./filtered-list.js";
import { bytes, count, ramp, stepName, when } from "./format.js";
import { jobsFeed } from "./jobs-feed.js";
import { showPin, startPin } from "./recording-actions.js";
import { stateInWords, toneOf } from "./recording-words.js";

const pair = new ChosenPair(document.getElementById("compare-dumps"), "/dumps/compare/");

const list = new FilteredList(document.getElementById("dumps"), {
  url: "/api/dumps", name: "dumps", noun: "dump", keyOf: ({ id }) => id,
  make(dump) {
    const row = fromTemplate("dump-row");
    row.addEventListener("click", () => { location.href = `/dumps/${dump.id}/`; });
    pair.watch(row.querySelector("input"), dump.id, dump.created_at);
    startPin(row, () => list.items.find(({ id }) => id === dump.id), "dump", (changed) => list.put(changed));
    row.querySelector("[data-do=stop]")?.addEventListener("click", (event) => {
      event.stopPropagation();
      openAction("stop_dump", { id: dump.id });
    });
    return row;
  },
  update(row, dump) {
    setData(row.querySelector(".dot"), "tone", toneOf(dump.state));
    setData(row.querySelector(".swatch"), "ramp", ramp(dump.epoch));
    row.querySelector("[data-f=state]").title = dump.message;
    fill(row, {
      id: dump.id, state: stateInWords(dump), rids: dump.rids.join(", ") || "every request", tensors: count(dump.tensors), size: bytes(dump.bytes),
      version: stepName(dump.token_step, dump.epoch), form: dump.form || "–", note: dump.note, actor: dump.actor, when: when(dump.created_at),
    });
    const stop = row.querySelector("[data-do=stop]");
    if (stop) stop.hidden = dump.state !== "capturing";
    showPin(row, dump);
  },
});

jobsFeed.watch();
jobsFeed.addEventListener("job", ({ detail: job }) => ["dump", "stop_dump"].includes(job.kind) && list.load(0));
startActions();
