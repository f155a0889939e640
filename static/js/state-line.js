// Foot of the rail and the thin bar under the top bar: the engine's truth on every page.

import { fill, h, icon, setData } from "./dom.js";
import { feed } from "./feed.js";
import { engineTruth, totals, versionLine } from "./fleet-state.js";
import { ago, rate } from "./format.js";

const SHOW_AGE_S = 2;

function drawTruth(box, truth, age) {
  setData(box.querySelector(".dot"), "tone", truth.tone);
  box.title = `Engine: ${truth.word}`;
  const snapshot = feed.snapshot;
  fill(box, {
    state: truth.word,
    age: snapshot && age > SHOW_AGE_S ? ago(age) : "",
    version: snapshot ? versionLine(snapshot) : "",
    speed: snapshot ? `${rate(totals(snapshot.ranks).tokens_per_s)} tok/s` : "",
  });
  box.classList.toggle("stale", age > 10);
}

function drawBar(bar, said) {
  bar.hidden = !said;
  if (!said) delete bar.dataset.what;
  if (!said) return;
  if (bar.dataset.text === said.text) return;
  setData(bar, "tone", said.tone);
  const what = said.text.replace(/\d+/g, ""); // seconds that pass are shown and not read out again
  bar.setAttribute("aria-live", bar.dataset.what === what ? "off" : "polite");
  bar.dataset.what = what;
  bar.dataset.text = said.text;
  bar.replaceChildren(icon(said.tone === "info" ? "info" : said.tone), h("span", {}, said.text));
}

function draw() {
  const now = Date.now() / 1000;
  const truth = engineTruth(feed.state, feed.connection, now);
  drawTruth(document.getElementById("engine-truth"), truth, now - feed.state.receivedAt);
  drawBar(document.getElementById("statebar"), truth.bar);
}

/** Draws now, on each frame and once a second (ages grow without frames). */
export function startStateLine() {
  feed.addEventListener("change", draw);
  feed.addEventListener("connection", draw);
  setInterval(() => document.hidden || draw(), 1000);
  draw();
}
