// <qd-theme>: one button, three states (system, light, dark), remembered in this browser.

import { icon } from "./dom.js";

export const themeNames = ["system", "light", "dark"];
const ICON = { system: "monitor", light: "sun", dark: "moon" };

function current() {
  return document.documentElement.dataset.theme ?? "system";
}

/** Applies and remembers a theme; charts listen to "qd-theme" on the document and redraw. */
export function setTheme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  localStorage.setItem("qd.theme", name);
  document.dispatchEvent(new Event("qd-theme"));
}

class ThemeToggle extends HTMLElement {
  connectedCallback() {
    this.button = this.querySelector("button");
    this.button.addEventListener("click", () => {
      setTheme(themeNames[(themeNames.indexOf(current()) + 1) % themeNames.length]);
    });
    document.addEventListener("qd-theme", () => this.draw());
    this.draw();
  }

  draw() {
    this.button.querySelector(".icon").replaceWith(icon(ICON[current()]));
    this.button.title = `Theme: ${current()}`;
    this.button.querySelector(".sr").textContent = `Theme: ${current()}`;
  }
}

customElements.define("qd-theme", ThemeToggle);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("qd-theme")));
