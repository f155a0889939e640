// One job: state, each rank's answer, what was asked, what changed.
//
// GET /api/jobs/ID -> {job: job as in jobs-feed.js plus {reason, request: {}, before: {}, after: {}, curl,
//   events: [{at, text}], links: [{label, url}]}}

import "./copy.js";
import { get } from "./api.js";
import { fill, h, setData } from "./dom.js";
import { clock, duration, exactly } from "./format.js";
import { rankChip } from "./job-chips.js";
import { hasEnded, jobsFeed, jobTone } from "./jobs-feed.js";
import { setFacts } from "./sheet.js";

const page = document.getElementById("job");
const id = page.dataset.job;
const factList = page.querySelector("dl.facts");

function changesOf(before, after) {
  const names = [...new Set([...Object.keys(before), ...Object.keys(after)])].filter((name) => before[name] !== after[name]);
  return names.map((name) => h("tr", {}, h("td", {}, name), h("td", { class: "mono" }, String(before[name] ?? "–")), h("td", { class: "mono" }, String(after[name] ?? "–"))));
}

function draw(job) {
  setData(page.querySelector(".job-state .dot"), "tone", jobTone(job.state));
  fill(page, { title: job.title, state: job.state, message: job.message });
  setFacts(factList, [
    ["By", job.actor], ["Reason", job.reason], ["Asked", exactly(job.created_at)], ["Took", job.ended_at ? duration(job.ended_at - job.created_at) : null],
    ["Progress", !hasEnded(job) && job.progress !== null ? `${Math.round(100 * job.progress)} %` : null],
  ]);
  page.querySelector("[data-ranks]").replaceChildren(...job.ranks.map((rank) => h("div", { class: "row" }, rankChip(rank), h("span", { class: "dim" }, rank.message))));
  page.querySelector("[data-events]").replaceChildren(...job.events.map((event) => h("li", {}, h("span", { class: "mono faint" }, clock(event.at)), " ", event.text)));
  page.querySelector("[data-links]").replaceChildren(...job.links.map(({ label, url }) => h("a", { class: "button", href: url }, label)));
  const changes = changesOf(job.before, job.after);
  page.querySelector("[data-changes]").hidden = !changes.length;
  page.querySelector("[data-changes] tbody").replaceChildren(...changes);
  page.querySelector("#job-request").textContent = JSON.stringify(job.request, null, 2);
  page.querySelector("#job-curl").textContent = job.curl;
}

async function refresh() {
  const problem = document.getElementById("job-problem");
  try {
    const { job } = await get(`/api/jobs/${id}`);
    problem.hidden = true;
    page.querySelector(".loaded").hidden = false;
    draw(job);
  } catch (error) {
    problem.hidden = false;
    fill(problem, { text: error.message });
  }
}

jobsFeed.watch();
jobsFeed.addEventListener("job", ({ detail: job }) => String(job.id) === id && refresh());
refresh();
