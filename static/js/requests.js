// Requests page: what is in flight, once a second.
//
// GET /api/requests -> {at, requests: [{rid, worker, dp, phase, prompt_tokens, prefilled_tokens,
//   output_tokens, max_new_tokens, age_s, epoch, token_step, actor, priority}]}
// phase: queued | prefill | decode | held | ending

import { get } from "./api.js";
import { fill, fromTemplate, h, setData } from "./dom.js";
import { count, duration, ramp, stepName } from "./format.js";
import { KeyedRows } from "./keyed-rows.js";
import { mayAct, openAction, startActions } from "./action-sheet.js";
import { facts, onSheetClose, openSheet, setFacts } from "./sheet.js";

const EVERY_MS = 1000;
const TONES = { queued: "info", prefill: "info", decode: "ok", held: "warn", ending: "warn" };

const page = document.getElementById("requests");
const filter = document.getElementById("request-filter");
let newest = [];
let openDetail = null; // redraws the open sheet

const rows = new KeyedRows(document.getElementById("request-table"), {
  keyOf: ({ rid }) => rid,
  noun: "request",
  make(request) {
    const row = fromTemplate("request-row");
    row.addEventListener("click", () => show(request.rid));
    row.querySelector("[data-do=abort]").addEventListener("click", (event) => {
      event.stopPropagation();
      openAction("abort_request", { rid: request.rid });
    });
    return row;
  },
  update(row, request) {
    const { phase } = request;
    setData(row.querySelector(".dot"), "tone", TONES[phase] ?? "bad");
    setData(row.querySelector(".swatch"), "ramp", ramp(request.epoch));
    const done = phase === "prefill" ? request.prefilled_tokens / request.prompt_tokens : request.output_tokens / request.max_new_tokens;
    row.querySelector(".meter span").style.width = `${Math.min(100, 100 * (phase === "queued" ? 0 : done))}%`;
    fill(row, {
      rid: request.rid, phase, progress: progress(request), age: duration(request.age_s), worker: request.worker, rank: request.dp === null ? "–" : `dp${request.dp}`,
      version: stepName(request.token_step, request.epoch), prompt: count(request.prompt_tokens), actor: request.actor,
    });
  },
});

function progress({ phase, prompt_tokens: prompt, prefilled_tokens: filled, output_tokens: output, max_new_tokens: most }) {
  if (phase === "queued") return "waits";
  return phase === "prefill" ? `${count(filled)} of ${count(prompt)} prompt` : `${count(output)} of at most ${count(most)}`;
}

function show(rid) {
  const request = newest.find((one) => one.rid === rid);
  if (!request) return;
  const list = facts(factsOf(request));
  const abort = mayAct("abort_request") ? [h("button", { type: "button", class: "button danger", onclick: () => openAction("abort_request", { rid }) }, "Abort request")] : [];
  openSheet("Request", [list], abort);
  openDetail = () => {
    const now = newest.find((one) => one.rid === rid);
    setFacts(list, factsOf(now ?? { ...request, phase: "ended" }));
  };
  onSheetClose(() => { openDetail = null; });
}

function factsOf(request) {
  return [
    ["Id", request.rid], ["Phase", request.phase], ["Progress", progress(request)], ["Age", duration(request.age_s)], ["Worker", request.worker],
    ["Rank", request.dp === null ? null : `dp${request.dp}`], ["Weights", stepName(request.token_step, request.epoch)], ["Prompt", `${count(request.prompt_tokens)} tokens`],
    ["Priority", request.priority], ["Sent by", request.actor],
  ];
}

function matches(request) {
  const words = filter.value.trim().toLowerCase();
  return !words || [request.rid, request.phase, `worker ${request.worker}`, `dp${request.dp}`, request.actor].some((text) => text.toLowerCase().includes(words));
}

function draw() {
  const shown = newest.filter(matches);
  rows.show(shown);
  fill(page, { count: newest.length ? String(newest.length) : "" });
  document.getElementById("no-requests").hidden = newest.length > 0;
  document.getElementById("no-match").hidden = shown.length > 0 || newest.length === 0;
  document.getElementById("request-table").hidden = shown.length === 0;
}

async function refresh() {
  const problem = document.getElementById("requests-problem");
  try {
    newest = (await get("/api/requests")).requests;
    problem.hidden = true;
    draw();
    openDetail?.();
  } catch (error) {
    problem.hidden = false;
    fill(problem, { text: `The list cannot be read: ${error.message} What is shown is old.` });
  }
}

filter.value = new URLSearchParams(location.search).get("q") ?? "";
filter.addEventListener("input", draw);
startActions();
refresh();
setInterval(() => document.hidden || refresh(), EVERY_MS);
