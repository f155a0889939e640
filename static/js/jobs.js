// Jobs and audit: both lists are paged by the server; jobs also change while they are looked at.
//
// GET /api/jobs?state&kind&q&offset -> {jobs: [job], next}; a job as in jobs-feed.js
// GET /api/audit?action&actor&q&offset -> {entries: [{id, at, actor, via, action, target, result, job, hash}], next,
//   verified: {ok, entries, at, broken_at}}

import { fill, fromTemplate, setData } from "./dom.js";
import { FilteredList } from "./filtered-list.js";
import { duration, when } from "./format.js";
import { rankChip } from "./job-chips.js";
import { hasEnded, jobsFeed, jobTone } from "./jobs-feed.js";

const jobsBox = document.getElementById("jobs");
const auditBox = document.getElementById("audit");

function jobRow(job) {
  const row = fromTemplate("job-row");
  row.addEventListener("click", () => { location.href = `/jobs/${job.id}/`; });
  return row;
}

function fillJob(row, job) {
  setData(row.querySelector(".dot"), "tone", jobTone(job.state));
  fill(row, {
    id: job.id, title: job.title, state: job.state, message: job.message, actor: job.actor, when: when(job.created_at),
    took: job.ended_at ? duration(job.ended_at - job.created_at) : hasEnded(job) ? "–" : "runs",
  });
  row.querySelector("[data-ranks]").replaceChildren(...job.ranks.filter(({ state }) => state !== "done").map(rankChip));
}

function fillEntry(row, entry) {
  fill(row, { at: when(entry.at), actor: entry.actor, via: entry.via, action: entry.action, target: entry.target, result: entry.result, hash: entry.hash.slice(0, 12) });
  const link = row.querySelector("a");
  link.hidden = !entry.job;
  if (entry.job) {
    link.href = `/jobs/${entry.job}/`;
    link.textContent = `job ${entry.job}`;
  }
}

if (jobsBox) {
  const list = new FilteredList(jobsBox, { url: "/api/jobs", name: "jobs", keyOf: ({ id }) => id, noun: "job", make: jobRow, update: fillJob });
  jobsFeed.watch();
  jobsFeed.addEventListener("job", ({ detail: job }) => {
    if (!list.query() || list.items.some(({ id }) => id === job.id)) list.put(job);
  });
}
if (auditBox) {
  new FilteredList(auditBox, { url: "/api/audit", name: "entries", keyOf: ({ id }) => id, noun: "entry", make: () => fromTemplate("audit-row"), update: fillEntry });
}
