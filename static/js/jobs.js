// Jobs and audit: both lists are paged by the server; jobs also change while they are looked at.
//
// GET /api/jobs?state&kind&q&offset -> {jobs: [job], next}; a job as in jobs-feed.js
// GET /api/audit?action&actor&q&offset -> {entries: [{id, at, actor, via, action, target, result, job, hash}], next}
// GET /api/audit/verify -> {ok, entries, broken_at, problem}

import { get } from "./api.js";
import { fill, fromTemplate, setData } from "./dom.js";
import { FilteredList } from "./filtered-list.js";
import { count, duration, exactly, when } from "./format.js";
import { hasEnded, jobsFeed, jobTone } from "./jobs-feed.js";

const jobsBox = document.getElementById("jobs");
const auditBox = document.getElementById("audit");

function jobRow(job) {
  const row = fromTemplate("job-row");
  row.addEventListener("click", () => { location.href = `/jobs/${job.id}/`; });
  return row;
}

/** "dp1·tp0 failed" of one, "2 sent, 2 prepared" of several; nothing when all are done. */
function ranksInWords(ranks) {
  const open = ranks.filter(({ state }) => state !== "done");
  if (open.length === 1) return `dp${open[0].dp}·tp${open[0].tp} ${open[0].state}`;
  return [...new Set(open.map(({ state }) => state))].map((name) => `${open.filter(({ state }) => state === name).length} ${name}`).join(", ");
}

function fillJob(row, job) {
  setData(row.querySelector(".dot"), "tone", jobTone(job.state));
  fill(row, {
    ranks: ranksInWords(job.ranks), id: job.id, title: job.title, state: job.state, message: job.message, actor: job.actor, when: when(job.created_at),
    took: job.ended_at ? duration(job.ended_at - job.created_at) : hasEnded(job) ? "–" : "runs",
  });
}

function fillEntry(row, entry) {
  fill(row, { at: exactly(entry.at), actor: entry.actor, via: entry.via, action: entry.action, target: entry.target, result: entry.result, hash: entry.hash.slice(0, 12) });
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
/** Reads the whole chain again on the server and says what it found. */
async function verify(event) {
  const output = document.getElementById("chain");
  event.currentTarget.disabled = true;
  output.textContent = "Reading the chain…";
  try {
    const found = await get("/api/audit/verify");
    setData(output, "tone", found.ok ? "ok" : "bad");
    output.textContent = found.ok ? `Unbroken, ${count(found.entries)} read` : `Broken: ${found.problem}`;
  } catch (error) {
    setData(output, "tone", "bad");
    output.textContent = `The chain cannot be read: ${error.message}`;
  } finally {
    document.getElementById("verify").disabled = false;
  }
}

if (auditBox) {
  document.getElementById("verify").addEventListener("click", verify);
  new FilteredList(auditBox, { url: "/api/audit", name: "entries", keyOf: ({ id }) => id, noun: "entry", make: () => fromTemplate("audit-row"), update: fillEntry });
}
