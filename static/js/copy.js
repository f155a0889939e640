// <qd-copy for="id">: copies the text of that element (or its own `text` attribute) and says so.
// Without `for`, of its property `source`, or else of the element that stands before it.

import { icon } from "./dom.js";

const SAID_MS = 1500;

class CopyButton extends HTMLElement {
  connectedCallback() {
    this.button = document.createElement("button");
    this.button.type = "button";
    this.button.className = "button quiet only";
    this.button.addEventListener("click", () => this.copy());
    this.replaceChildren(this.button);
    this.draw("copy", this.getAttribute("label") ?? "Copy");
  }

  draw(name, label) {
    const said = document.createElement("span");
    said.className = "sr";
    said.setAttribute("role", "status");
    said.textContent = label;
    this.button.title = label;
    this.button.replaceChildren(icon(name), said);
  }

  async copy() {
    const source = document.getElementById(this.getAttribute("for")) ?? this.source ?? this.previousElementSibling;
    const text = this.getAttribute("text") ?? source.value ?? source.textContent;
    try {
      await navigator.clipboard.writeText(text.trim());
      this.draw("check", "Copied");
    } catch {
      select(source); // no clipboard without https: leave it selected for Ctrl-C
      this.draw("copy", "Selected: press Ctrl-C");
    }
    setTimeout(() => this.draw("copy", this.getAttribute("label") ?? "Copy"), SAID_MS);
  }
}

function select(element) {
  const range = document.createRange();
  range.selectNodeContents(element);
  getSelection().removeAllRanges();
  getSelection().addRange(range);
}

customElements.define("qd-copy", CopyButton);
