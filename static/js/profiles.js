// Profiles: the library; two chosen profiles are compared.
//
// GET /api/profiles?q&state&pinned&offset -> {profiles: [{id, created_at, state, ranks_found, ranks_expected,
//   missing: [name], steps, bytes, pinned, expired, note, actor, largest_gap_ms}], next}
// state: capturing | merging | ready | partial | failed; expired: its files made room for others
// PATCH /api/profiles/ID {pinned, note}; DELETE /api/profiles/ID

import "./retention.js";
import { openAction, startActions } from "./action-sheet.js";
import { ChosenPair } from "./chosen-pair.js";
import { fill, fromTemplate, setData } from "./dom.js";
import { FilteredList } from "./filtered-list.js";
import { bytes, count, when } from "./format.js";
import { jobsFeed } from "./jobs-feed.js";
import { showPin, startPin } from "./recording-actions.js";
import { ranksInWords, stateInWords, toneOf } from "./recording-words.js";

const pair = new ChosenPair(document.getElementById("compare-profiles"), "/profiles/compare/");

const list = new FilteredList(document.getElementById("profiles"), {
  url: "/api/profiles", name: "profiles", noun: "profile", keyOf: ({ id }) => id,
  make(profile) {
    const row = fromTemplate("profile-row");
    row.addEventListener("click", () => { location.href = `/profiles/${profile.id}/`; });
    pair.watch(row.querySelector("input"), profile.id, profile.created_at);
    startPin(row, () => list.items.find(({ id }) => id === profile.id), "profile", (changed) => list.put(changed));
    row.querySelector("[data-do=stop]")?.addEventListener("click", (event) => {
      event.stopPropagation();
      openAction("stop_profile", { id: profile.id });
    });
    return row;
  },
  update(row, profile) {
    setData(row.querySelector(".dot"), "tone", toneOf(profile.state));
    fill(row, {
      id: profile.id, state: stateInWords(profile), ranks: ranksInWords(profile), steps: count(profile.steps), size: bytes(profile.bytes),
      gap: profile.largest_gap_ms === null ? "–" : `${Math.round(profile.largest_gap_ms)} ms`, note: profile.note, actor: profile.actor, when: when(profile.created_at),
    });
    const stop = row.querySelector("[data-do=stop]");
    if (stop) stop.hidden = profile.state !== "capturing";
    showPin(row, profile);
  },
});

jobsFeed.watch();
jobsFeed.addEventListener("job", ({ detail: job }) => ["profile", "merge_profile", "stop_profile"].includes(job.kind) && list.load(0));
startActions();
