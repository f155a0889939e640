// Connect page: snippets with this server's address and, if typed, the user's key.

import "./copy.js";
import { h } from "./dom.js";
import { CLIENTS } from "./snippets.js";

const page = document.getElementById("connect");
const key = document.getElementById("key");
const showKey = document.getElementById("show-key");
const buttons = page.querySelectorAll("[data-client]");
let client = "openai";

function draw() {
  const facts = { base: page.dataset.baseUrl, model: "default", key: key.value.trim() };
  document.getElementById("snippets").replaceChildren(...CLIENTS[client](facts).map(({ title, text }, index) => {
    const id = `snippet-${client}-${index}`;
    return h("div", { class: "snippet" }, h("h3", {}, title), h("div", { class: "code" }, h("pre", { id, tabIndex: 0 }, text), h("qd-copy", { for: id, label: "Copy the snippet" })));
  }));
  for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.client === client));
}

for (const button of buttons) {
  button.addEventListener("click", () => {
    client = button.dataset.client;
    draw();
  });
}
key.addEventListener("input", draw);
showKey.addEventListener("click", () => {
  const shown = key.type === "text";
  key.type = shown ? "password" : "text";
  showKey.textContent = shown ? "Show" : "Hide";
  showKey.setAttribute("aria-pressed", String(!shown));
});
draw();
