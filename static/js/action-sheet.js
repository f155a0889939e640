// A control action in the side sheet: what will happen, preview, reason, curl, the verb; then a chip.
//
// The fields of an action are markup: <template id="action-NAME" data-title data-verb data-danger>.
// POST /api/control/NAME/preview {fields} -> {will: [sentence], impact: sentence, curl, refusal: sentence or ""}
// POST /api/control/NAME {fields, reason, key} -> {job}

import "./copy.js";
import { request } from "./api.js";
import { fromTemplate, h, icon } from "./dom.js";
import { followJob } from "./job-chips.js";
import { openSheet } from "./sheet.js";

const PREVIEW_WAIT_MS = 250;

/**
 * Opens the sheet of an action. `given` are fields that are fixed by where it was opened from;
 * `words` names the template when it is not the action's own.
 */
export function openAction(name, given = {}, words = name) {
  const template = document.getElementById(`action-${words}`);
  new ActionSheet(name, template.dataset, fromTemplate(`action-${words}`), given).open();
}

/** Whether the page has the action's sheet: only for those who may act. */
export function mayAct(name) {
  return document.getElementById(`action-${name}`) !== null;
}

/** Wires every [data-action] of the page; its other data- attributes become given fields. */
export function startActions() {
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-action]");
    if (!button) return;
    event.stopPropagation();
    const { action, ...given } = button.dataset;
    openAction(action, given);
  });
}

/** Values of a form: numbers as numbers, empty fields left out, repeated names as lists. */
function valuesOf(form) {
  const values = {};
  for (const field of form.elements) {
    if (!field.name || field.disabled || ((field.type === "checkbox" || field.type === "radio") && !field.checked && !("boolean" in field.dataset))) continue;
    const value = "boolean" in field.dataset ? field.checked : field.type === "number" ? field.valueAsNumber * (field.dataset.scale ?? 1) : field.value.trim();
    if (value === "" || Number.isNaN(value)) continue;
    if ("list" in field.dataset) values[field.name] = [...(values[field.name] ?? []), value];
    else values[field.name] = value;
  }
  return values;
}

class ActionSheet {
  constructor(name, { title, verb, danger }, fields, given) {
    Object.assign(this, { name, title, verb, given, fields });
    this.key = crypto.getRandomValues(new Uint32Array(4)).join("-"); // a second click cannot act twice
    this.will = h("div", { class: "will" }, h("span", { class: "skeleton" }));
    this.reason = h("input", { class: "input", name: "reason", required: true, maxLength: 200, autocomplete: "off", placeholder: "Kept in the audit" });
    this.curl = h("pre", { id: "action-curl", tabIndex: 0 });
    this.problem = h("div", { class: "notice", role: "alert", hidden: true, data: { tone: "bad" } }, icon("bad"), h("p"));
    this.form = h("form", { id: "action-form", onsubmit: (event) => this.send(event) }, fields,
      h("label", { class: "field" }, h("span", { class: "name" }, "Reason"), this.reason));
    this.form.addEventListener("input", (event) => event.target === this.reason || this.previewSoon());
    this.button = h("button", { class: `button primary${danger === undefined ? "" : " danger"}` , disabled: true }, verb);
    this.button.setAttribute("form", "action-form");
  }

  open() {
    for (const [name, value] of Object.entries(this.given)) {
      const field = this.form.elements[name];
      if (field) field.value = value;
    }
    openSheet(this.title, [this.form, h("section", {}, h("h3", {}, "What will happen"), this.will),
      h("details", {}, h("summary", { class: "small dim" }, "The same with curl"), h("div", { class: "code" }, this.curl, h("qd-copy", { for: "action-curl", label: "Copy" }))), this.problem], [this.button]);
    [...this.form.elements].find((field) => field.required && !field.value)?.focus();
    this.preview();
  }

  previewSoon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.preview(), PREVIEW_WAIT_MS);
  }

  values() {
    return { ...this.given, ...valuesOf(this.form) };
  }

  async preview() {
    try {
      const seen = await request("POST", `/api/control/${this.name}/preview`, this.values());
      this.will.replaceChildren(...seen.will.map((line) => h("p", {}, line)), h("p", { class: "impact" }, seen.impact));
      this.curl.textContent = seen.curl;
      this.button.disabled = Boolean(seen.refusal);
      this.tell(seen.refusal);
    } catch (error) {
      this.will.replaceChildren(h("p", { class: "dim" }, "No preview."));
      this.button.disabled = error.status === 403;
      this.tell(error.message);
    }
  }

  async send(event) {
    event.preventDefault();
    this.button.disabled = true;
    try {
      const { job } = await request("POST", `/api/control/${this.name}`, { ...this.values(), key: this.key });
      document.getElementById("sheet").close();
      followJob(job);
    } catch (error) {
      this.tell(error.retryAfterS ? `${error.message} Try again in ${error.retryAfterS} s.` : error.message);
      this.button.disabled = false;
    }
  }

  tell(text) {
    this.problem.hidden = !text;
    this.problem.querySelector("p").textContent = text;
  }
}
