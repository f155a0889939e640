// <qd-answer>: one answer in the transcript: text, token view, one line of facts, errors in words.

import "./copy.js";
import { explain } from "./advice.js";
import { isLive, tokenCount } from "./chat-stream.js";
import { fill, fromTemplate, h, setData } from "./dom.js";
import { epochs, stepOf } from "./epochs.js";
import { count, duration, plural, ramp, rate } from "./format.js";
import { MarkdownView } from "./markdown-view.js";
import { TokenView } from "./token-view.js";

const DRAW_EVERY_MS = 100; // Markdown is drawn at most ten times a second

class AnswerView extends HTMLElement {
  constructor() {
    super();
    this.answer = null;
    this._timer = 0;
    this._drawnAt = 0;
  }

  /** Shows `answer` and wires the buttons: `sendAgain` asks the question anew. */
  bind(answer, { sendAgain }) {
    this.answer = answer;
    this.append(fromTemplate("answer"));
    this.body = this.querySelector(".answer-body");
    this.markdown = new MarkdownView(this.body);
    this.querySelector("[data-do=tokens]").addEventListener("click", () => this.toggleTokens());
    this.querySelector("[data-do=again]").addEventListener("click", sendAgain);
    epochs.addEventListener("change", () => this.drawFacts());
    this.draw();
    return this;
  }

  /** The answer changed: draws now or at the end of the current tenth of a second. */
  changed() {
    if (this._timer) return;
    const wait = isLive(this.answer) ? Math.max(0, this._drawnAt + DRAW_EVERY_MS - performance.now()) : 0;
    this._timer = setTimeout(() => requestAnimationFrame(() => this.draw()), wait);
  }

  draw() {
    this._timer = 0;
    this._drawnAt = performance.now();
    const { answer } = this;
    setData(this, "phase", answer.phase);
    this.setAttribute("aria-busy", String(isLive(answer)));
    if (this.tokenView) this.tokenView.show(answer);
    else this.markdown.show(answer.text);
    this.drawFacts();
    this.drawProblem();
    this.querySelector(".tools").hidden = isLive(answer);
    this.querySelector("[data-do=tokens]").hidden = !answer.tokenIds.length;
    this.drawCopy();
    fill(this, { again: answer.phase === "failed" || answer.phase === "lost" ? "Send again" : "Regenerate" });
    this.dispatchEvent(new CustomEvent("qd-grown", { bubbles: true }));
  }

  drawCopy() {
    const copy = this.querySelector(".tools qd-copy");
    copy.hidden = !this.answer.text;
    copy.source = this.body;
    if (!isLive(this.answer)) copy.setAttribute("text", this.answer.text);
  }

  drawFacts() {
    const facts = this.querySelector(".facts-line");
    const shown = factsOf(this.answer);
    if (facts.dataset.shown === shown.map(({ text }) => text).join()) return;
    facts.dataset.shown = shown.map(({ text }) => text).join();
    facts.replaceChildren(...shown.map(({ text, title, epoch }) => h("span", { title }, epoch === undefined ? null : swatch(epoch), text)));
  }

  drawProblem() {
    const box = this.querySelector(".problem");
    const problem = problemOf(this.answer);
    box.hidden = !problem;
    if (!problem) return;
    setData(box, "tone", problem.tone);
    fill(box, problem);
  }

  toggleTokens() {
    const button = this.querySelector("[data-do=tokens]");
    const on = !this.tokenView;
    button.setAttribute("aria-pressed", String(on));
    if (on) {
      this.tokenView = new TokenView(this.body);
      this.tokenView.show(this.answer);
    } else {
      this.tokenView = null;
      this.markdown.reset();
      this.markdown.show(this.answer.text);
    }
    this.dispatchEvent(new CustomEvent("qd-grown", { bubbles: true }));
  }
}

function swatch(epoch) {
  return h("i", { class: "swatch", data: { ramp: ramp(epoch) } });
}

/** The line under an answer: [{text, title, epoch}]. */
function factsOf(answer) {
  const facts = [];
  if (answer.phase === "sent") facts.push({ text: "waiting for the first token" });
  if (answer.worker) facts.push({ text: `worker ${answer.worker}`, title: answer.via && answer.via !== answer.worker ? `this browser's socket is on worker ${answer.via}` : "" });
  if (answer.rank !== null) facts.push({ text: `dp${answer.rank}` });
  for (const epoch of new Set(answer.epochs.map(([, epoch]) => epoch))) {
    facts.push({ text: stepOf(epoch), title: `weights of epoch ${epoch}`, epoch });
  }
  if (answer.ttftMs !== null) facts.push({ text: `TTFT ${duration(answer.ttftMs / 1000)}`, title: "time to the first token" });
  if (answer.tokensPerS !== null) facts.push({ text: `${rate(answer.tokensPerS)} tok/s` });
  const tokens = tokenCount(answer);
  if (tokens) facts.push({ text: plural(tokens, "token"), title: answer.usage ? `prompt ${count(answer.usage.prompt_tokens)}, of which ${count(answer.usage.cached_tokens)} from cache` : "" });
  if (answer.finish?.type === "length") facts.push({ text: "cut at the maximum of new tokens" });
  return facts;
}

/** What went differently, in words: {tone, what, detail, todo} or null. */
function problemOf(answer) {
  const tokens = plural(tokenCount(answer), "token");
  if (answer.phase === "stopping") return { tone: "info", what: "Stopping…", detail: "", todo: "" };
  if (answer.phase === "stopped") {
    const slot = { true: ", slot freed", false: ", the engine has not confirmed that its slot is free" }[answer.slotFreed] ?? "";
    return { tone: answer.slotFreed === false ? "warn" : "info", what: `Stopped, ${tokens}${slot}`, detail: "", todo: "" };
  }
  if (answer.phase === "lost") {
    return { tone: "warn", what: `This answer went on or was ended while the page was away, ${tokens} seen here`, detail: "", todo: "Reload to see what was stored, or send again." };
  }
  if (answer.phase === "elsewhere") return { tone: "info", what: "This answer goes on in another tab", detail: "", todo: "" };
  if (answer.phase === "failed") return { tone: "bad", ...explain(answer.error) };
  if (answer.skipped) return { tone: "warn", what: `Lagged, ${plural(answer.skipped, "frame")} skipped`, detail: "", todo: "Reload to see all." };
  return null;
}

customElements.define("qd-answer", AnswerView);
