// The side sheet: one <dialog> per page, filled by whoever opens it.

import { h } from "./dom.js";

/** Opens the sheet with a title, body nodes and footer buttons; gives the body element. */
export function openSheet(title, body, footer = []) {
  const sheet = document.getElementById("sheet");
  const foot = sheet.querySelector("footer");
  sheet.querySelector("h2").textContent = title;
  sheet.querySelector(".body").replaceChildren(...body);
  foot.replaceChildren(...footer);
  foot.hidden = footer.length === 0;
  if (!sheet.dataset.wired) {
    sheet.dataset.wired = "yes";
    sheet.querySelector("[data-close]").addEventListener("click", () => sheet.close());
    sheet.addEventListener("click", (event) => event.target === sheet && sheet.close());
  }
  if (!sheet.open) sheet.showModal();
  return sheet.querySelector(".body");
}

/** Closes it, and calls `then` when it closes by any way. */
export function onSheetClose(then) {
  document.getElementById("sheet").addEventListener("close", then, { once: true });
}

/** A list of facts: [[name, value or node], ...]; null values are left out. */
export function facts(pairs) {
  const list = h("dl", { class: "facts" });
  setFacts(list, pairs);
  return list;
}

/** Writes facts into a list that is already shown; only what changed is touched. */
export function setFacts(list, pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  const names = shown.map(([name]) => name).join("|");
  if (list.dataset.names !== names) {
    list.dataset.names = names;
    list.replaceChildren(...shown.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
    return;
  }
  const targets = list.querySelectorAll("dd");
  shown.forEach(([, value], index) => {
    if (!(value instanceof Node) && targets[index].textContent !== String(value)) targets[index].textContent = value;
  });
}
