// The corner where an action that was just sent tells how it goes: queued, sent, each rank, done.

import { h, icon, setData } from "./dom.js";
import { duration } from "./format.js";
import { hasEnded, jobsFeed, jobTone } from "./jobs-feed.js";

const CHECK_EVERY_MS = 2000; // the row is read too, so a lost hint cannot leave a chip behind
const GONE_AFTER_MS = 8000; // a job that went well leaves by itself

const corner = document.getElementById("job-chips");
const chips = new Map(); // job id -> {element, job}

/** Shows a job and follows it to its end. */
export function followJob(job) {
  jobsFeed.watch();
  draw(job);
}

function draw(job) {
  const known = chips.get(job.id);
  const element = h("div", { class: "job-chip" },
    h("div", { class: "row" }, h("span", { class: "dot", data: { tone: jobTone(job.state) } }), titleOf(job),
      h("span", { class: "small faint push" }, words(job)),
      h("button", { type: "button", class: "button quiet only", title: "Hide", onclick: () => remove(job.id) }, icon("close"), h("span", { class: "sr" }, "Hide"))),
    job.message ? h("div", { class: "small dim" }, job.message) : null,
    h("div", { class: "ranks" }, ...job.ranks.map(rankChip)));
  if (known) known.element.replaceWith(element);
  else corner.append(element);
  chips.set(job.id, { element, job });
  if (hasEnded(job) && job.state === "done" && !(known && hasEnded(known.job))) setTimeout(() => remove(job.id), GONE_AFTER_MS);
}

/** A job that was done while the database was away has no number and no page yet. */
function titleOf(job) {
  return job.id === null ? h("span", { class: "cut" }, job.title) : h("a", { class: "cut", href: `/jobs/${job.id}/` }, job.title);
}

function words(job) {
  if (hasEnded(job)) return job.ended_at ? `${job.state}, ${duration(job.ended_at - job.created_at)}` : job.state;
  return job.progress === null ? job.state : `${job.state}, ${Math.round(100 * job.progress)} %`;
}

/** One rank's answer: a dot, its name, its word. */
export function rankChip(rank) {
  const chip = h("span", { class: "chip", title: rank.message }, h("span", { class: "dot" }), `dp${rank.dp}·tp${rank.tp} ${rank.state}`);
  setData(chip.querySelector(".dot"), "tone", jobTone(rank.state));
  return chip;
}

function remove(id) {
  chips.get(id)?.element.remove();
  chips.delete(id);
}

jobsFeed.addEventListener("job", ({ detail: job }) => chips.has(job.id) && draw(job));
setInterval(() => {
  for (const { job } of chips.values()) if (!hasEnded(job)) jobsFeed.read(job.id).catch(() => remove(job.id));
}, CHECK_EVERY_MS);
