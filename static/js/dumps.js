// Dumps: the library; two chosen dumps are compared.
//
// GET /api/dumps?q&offset -> {dumps: [{id, created_at, state, rids: [rid], points, tensors, bytes, epoch, token_step, form,
//   missing: [rank], pinned, note, actor}], next};  state: armed | capturing | ready | partial | failed

import { startActions } from "./action-sheet.js";
import { fill, fromTemplate, setData } from "./dom.js";
import { FilteredList } from "./filtered-list.js";
import { bytes, count, ramp, stepName, when } from "./format.js";
import { jobsFeed } from "./jobs-feed.js";

const TONES = { armed: "info", capturing: "info", ready: "ok", partial: "warn" };
const chosen = [];
const compare = document.getElementById("compare-dumps");

function choose(id, on) {
  if (on) chosen.push(id);
  else chosen.splice(chosen.indexOf(id), 1);
  compare.setAttribute("aria-disabled", String(chosen.length !== 2));
  if (chosen.length === 2) compare.href = `/dumps/compare/?a=${chosen[0]}&b=${chosen[1]}`;
  else compare.removeAttribute("href");
}

const list = new FilteredList(document.getElementById("dumps"), {
  url: "/api/dumps", name: "dumps", noun: "dump", keyOf: ({ id }) => id,
  make(dump) {
    const row = fromTemplate("dump-row");
    row.addEventListener("click", () => { location.href = `/dumps/${dump.id}/`; });
    const box = row.querySelector("input");
    box.addEventListener("click", (event) => event.stopPropagation());
    box.addEventListener("change", () => choose(dump.id, box.checked));
    return row;
  },
  update(row, dump) {
    setData(row.querySelector(".dot"), "tone", TONES[dump.state] ?? "bad");
    setData(row.querySelector(".swatch"), "ramp", ramp(dump.epoch));
    fill(row, {
      id: dump.id, state: dump.missing.length ? `${dump.state}, missing ${dump.missing.join(", ")}` : dump.state, rids: dump.rids.join(", "), tensors: count(dump.tensors),
      size: bytes(dump.bytes), version: stepName(dump.token_step, dump.epoch), form: dump.form, actor: dump.actor, when: when(dump.created_at),
    });
  },
});

jobsFeed.watch();
jobsFeed.addEventListener("job", ({ detail: job }) => ["dump", "stop_dump"].includes(job.kind) && list.load(0));
startActions();
