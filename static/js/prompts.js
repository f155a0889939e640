// Two small dialogs: ask for a line of text, confirm something that cannot be undone.

import { h } from "./dom.js";

function ask(title, content, verb, danger) {
  return new Promise((resolve) => {
    const dialog = h("dialog", { class: "prompt", "aria-label": title });
    const cancel = h("button", { type: "button", class: "button", onclick: () => dialog.close("") }, "Cancel");
    const go = h("button", { class: `button primary${danger ? " danger" : ""}`, value: "go" }, verb);
    dialog.append(h("form", { method: "dialog" }, h("h2", {}, title), content, h("div", { class: "row" }, h("span", { class: "push" }), cancel, go)));
    dialog.addEventListener("close", () => {
      resolve(dialog.returnValue === "go");
      dialog.remove();
    });
    document.body.append(dialog);
    dialog.showModal();
    if (danger) cancel.focus();
  });
}

/** The text, or null when the user let it be. */
export async function askText(title, label, value, verb) {
  const input = h("input", { class: "input", value, required: true, maxLength: 200, autocomplete: "off" });
  const field = h("label", { class: "field" }, h("span", { class: "name" }, label), input);
  input.select();
  return (await ask(title, field, verb, false)) ? input.value.trim() : null;
}

/** True when the user said the verb. */
export function confirmDanger(title, text, verb) {
  return ask(title, h("p", { class: "dim" }, text), verb, true);
}
