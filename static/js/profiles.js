// Profiles: the library.
//
// GET /api/profiles?q&state&offset -> {profiles: [{id, created_at, state, ranks_found, ranks_expected, missing: [name],
//   steps, bytes, pinned, note, actor, largest_gap_ms, progress}], next}
// state: capturing | writing | merging | ready | partial | failed
// PATCH /api/profiles/ID {pinned, note}; DELETE /api/profiles/ID

import { startActions } from "./action-sheet.js";
import { request } from "./api.js";
import { fill, fromTemplate, setData } from "./dom.js";
import { FilteredList } from "./filtered-list.js";
import { bytes, count, when } from "./format.js";
import { jobsFeed } from "./jobs-feed.js";
import { ranksInWords } from "./profile-words.js";

const TONES = { capturing: "info", writing: "info", merging: "info", ready: "ok", partial: "warn" };

const list = new FilteredList(document.getElementById("profiles"), {
  url: "/api/profiles", name: "profiles", noun: "profile", keyOf: ({ id }) => id,
  make(profile) {
    const row = fromTemplate("profile-row");
    row.addEventListener("click", () => { location.href = `/profiles/${profile.id}/`; });
    row.querySelector("[data-do=pin]").addEventListener("click", async (event) => {
      event.stopPropagation();
      const pinned = event.currentTarget.getAttribute("aria-pressed") !== "true";
      list.put({ ...list.items.find(({ id }) => id === profile.id), ...(await request("PATCH", `/api/profiles/${profile.id}`, { pinned })).profile });
    });
    return row;
  },
  update(row, profile) {
    setData(row.querySelector(".dot"), "tone", TONES[profile.state] ?? "bad");
    fill(row, {
      id: profile.id, state: profile.progress === null ? profile.state : `${profile.state} ${Math.round(100 * profile.progress)} %`, ranks: ranksInWords(profile),
      steps: count(profile.steps), size: bytes(profile.bytes), gap: profile.largest_gap_ms === null ? "–" : `${Math.round(profile.largest_gap_ms)} ms`,
      note: profile.note, actor: profile.actor, when: when(profile.created_at),
    });
    row.querySelector("[data-do=pin]").setAttribute("aria-pressed", String(profile.pinned));
  },
});

jobsFeed.watch();
jobsFeed.addEventListener("job", ({ detail: job }) => ["profile", "merge_profile", "stop_profile"].includes(job.kind) && list.load(0));
startActions();
