// Token view of an answer: one span per token, coloured by weights step, logprob or entropy.

import { get } from "./api.js";
import { fromTemplate, h, setData } from "./dom.js";
import { epochs, stepOf } from "./epochs.js";
import { ramp, when } from "./format.js";
import { facts, openSheet } from "./sheet.js";
import { binOf, epochOfEach, fromBase64, legendOf, probability, spansOf, visible } from "./tokens.js";

const MODE_KEY = "qd.token-mode";
const BATCH = 500; // ids in one request

const known = new Map(); // id -> bytes; they never change for a served model
const bytesOf = (id) => known.get(id) ?? new Uint8Array();
const textOf = (id) => new TextDecoder().decode(bytesOf(id));

async function loadBytes(ids) {
  const missing = [...new Set(ids)].filter((id) => !known.has(id));
  for (let at = 0; at < missing.length; at += BATCH) {
    const { tokens } = await get(`/api/tokens?ids=${missing.slice(at, at + BATCH).join(",")}`);
    for (const [id, text] of Object.entries(tokens)) known.set(Number(id), fromBase64(text));
  }
}

export class TokenView {
  constructor(element) {
    this.element = element;
    this.box = fromTemplate("token-view");
    this.text = this.box.querySelector(".token-text");
    this.hint = this.box.querySelector(".token-hint");
    this.modes = this.box.querySelectorAll("[data-mode]");
    for (const button of this.modes) button.addEventListener("click", () => this.setMode(button.dataset.mode));
    this.text.addEventListener("pointerover", (event) => this.hover(event.target));
    this.text.addEventListener("pointerleave", () => { this.hint.hidden = true; });
    this.text.addEventListener("focusin", (event) => this.hover(event.target));
    this.text.addEventListener("click", (event) => this.open(event.target));
    this.text.addEventListener("keydown", (event) => this.onKey(event));
    this.mode = localStorage.getItem(MODE_KEY) ?? "step";
    epochs.addEventListener("change", () => this.spans && this.box.isConnected && this.draw());
    element.replaceChildren(this.box);
  }

  /** Shows the answer's tokens; called again while it grows. */
  async show(answer) {
    this.answer = answer;
    try {
      await loadBytes(answer.tokenIds.concat((answer.top ?? []).flatMap((row) => row.map(([id]) => id))));
    } catch (error) {
      this.text.replaceChildren(h("span", { class: "faint" }, `The tokens cannot be shown: ${error.message}`));
      return;
    }
    this.spans = spansOf(answer.tokenIds, bytesOf, answer.text);
    this.epochs = epochOfEach(answer.epochs);
    this.draw();
  }

  setMode(mode) {
    this.mode = mode;
    localStorage.setItem(MODE_KEY, mode);
    this.draw();
  }

  draw() {
    const has = { step: true, logprob: this.answer.logprobs !== null, entropy: this.answer.entropy !== null };
    const mode = has[this.mode] ? this.mode : "step";
    for (const button of this.modes) {
      button.disabled = !has[button.dataset.mode];
      button.title = button.disabled ? "Turn it on under Parameters before sending" : "";
      button.setAttribute("aria-pressed", String(button.dataset.mode === mode));
    }
    setData(this.text, "mode", mode);
    this.text.replaceChildren(...this.spans.flatMap((span, index) => this.spanNodes(span, index, mode)));
    this.drawLegend(mode);
  }

  spanNodes(span, index, mode) {
    const node = h("span", { class: span.outside ? "token outside" : "token", data: { at: index } }, span.text || visible(""));
    const epoch = this.epochs[span.first];
    if (mode === "step") node.dataset.ramp = ramp(epoch);
    else node.dataset.bin = binOf(mode, (mode === "logprob" ? this.answer.logprobs : this.answer.entropy)[span.first]);
    if (index === 0) node.tabIndex = 0;
    const starts = mode === "step" && epoch !== this.epochs[span.first - 1];
    return starts ? [h("span", { class: "run-mark", data: { ramp: ramp(epoch) } }, stepOf(epoch)), node] : [node];
  }

  drawLegend(mode) {
    const legend = this.box.querySelector(".token-legend");
    if (mode === "step") {
      const epochs = [...new Set(this.epochs)];
      legend.replaceChildren(...epochs.map((epoch) => h("span", {}, h("i", { class: "swatch", data: { ramp: ramp(epoch) } }), stepOf(epoch))));
      return;
    }
    const title = mode === "logprob" ? "−logprob, nats" : "entropy, nats";
    legend.replaceChildren(h("span", {}, title), ...legendOf(mode).map(({ bin, label }) => h("i", { class: "bin", data: { bin } }, label)));
  }

  hover(target) {
    const node = target.closest(".token");
    if (!node) return;
    const span = this.spans[node.dataset.at];
    this.hint.replaceChildren(...this.hintLines(span));
    this.hint.hidden = false;
    const box = this.box.getBoundingClientRect();
    const at = node.getBoundingClientRect();
    const width = this.hint.offsetWidth;
    this.hint.style.left = `${Math.min(Math.max(0, at.left - box.left), Math.max(0, box.width - width))}px`;
    this.hint.style.top = `${at.bottom - box.top + 4}px`;
  }

  hintLines(span) {
    const { answer } = this;
    const lines = [];
    for (let index = span.first; index < span.first + span.count; index += 1) {
      const id = answer.tokenIds[index];
      const values = [stepOf(this.epochs[index])];
      if (answer.logprobs) values.push(`${probability(answer.logprobs[index])} (${answer.logprobs[index].toFixed(2)} nats)`);
      if (answer.entropy) values.push(`entropy ${answer.entropy[index].toFixed(2)} nats`);
      lines.push(h("div", {}, h("code", {}, visible(textOf(id))), h("span", { class: "faint" }, ` id ${id} · token ${index} · ${values.join(" · ")}`)));
      for (const [other, value] of (answer.top?.[index] ?? []).filter(([other]) => other !== id)) {
        lines.push(h("div", { class: "other" }, h("code", {}, visible(textOf(other))), h("span", { class: "faint" }, ` ${probability(value)}`)));
      }
    }
    return lines;
  }

  /** Arrow keys walk the tokens, Enter opens the lineage. */
  onKey(event) {
    const node = event.target.closest(".token");
    if (!node) return;
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) {
      const next = this.text.querySelector(`[data-at="${Number(node.dataset.at) + step}"]`);
      if (next) {
        node.removeAttribute("tabindex");
        next.tabIndex = 0;
        next.focus();
      }
    } else if (event.key === "Enter") this.open(node);
    else return;
    event.preventDefault();
  }

  async open(target) {
    const node = target.closest(".token");
    if (!node) return;
    const span = this.spans[node.dataset.at];
    const { answer } = this;
    const epoch = this.epochs[span.first];
    const fixed = [
      ["Token", h("code", {}, visible(span.text))], ["Position", `${span.first}, of 0 to ${answer.tokenIds.length - 1}`], ["Logprob", nats(answer.logprobs?.[span.first])], ["Entropy", nats(answer.entropy?.[span.first])],
      ["Sampled by", `dp${answer.rank ?? "?"}, worker ${answer.worker}`],
      ["Request", h("code", {}, answer.rid || "–")], ["Epoch", epoch], ["Step", stepOf(epoch)],
    ];
    const lineage = h("div", {}, h("span", { class: "skeleton" }));
    openSheet("Which weights sampled this token", [facts(fixed), h("h3", {}, "Those weights"), lineage]);
    lineage.replaceChildren(await lineageOf(epoch));
  }
}

function nats(value) {
  return value === undefined || value === null ? null : `${value.toFixed(3)} nats`;
}

async function lineageOf(epoch) {
  try {
    const found = await epochs.lineage(epoch);
    return facts([
      ["Version", found.weight_version], ["Trainer step", found.token_step], ["Committed", found.committed_at ? when(found.committed_at) : null],
      ["Source", found.source ? h("code", {}, found.source) : null], ["Checksum", found.checksum ? h("code", {}, found.checksum) : null],
      ["Update", found.job ? h("a", { href: `/jobs/${found.job}/` }, `job ${found.job}`) : "served since the start"],
    ]);
  } catch (error) {
    return h("p", { class: "dim" }, `The lineage of epoch ${epoch} cannot be shown: ${error.message}`);
  }
}
