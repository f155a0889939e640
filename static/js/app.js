// On every page: state line, command palette, theme, rail, keys in tables, copy buttons.

import "./copy.js";
import { addCommands, startPalette } from "./palette.js";
import { startStateLine } from "./state-line.js";
import { startTableKeys } from "./table-keys.js";
import { setTheme, themeNames } from "./theme-toggle.js";

function toggleRail() {
  const root = document.documentElement;
  const icons = root.dataset.rail !== "icons";
  if (icons) root.dataset.rail = "icons";
  else delete root.dataset.rail;
  localStorage.setItem("qd.rail", icons ? "icons" : "full");
}

/** True while the user types; then single keys are text and not commands. */
function isTyping(event) {
  return event.target.closest("input, textarea, select, [contenteditable], dialog[open]") !== null;
}

document.getElementById("rail-toggle").addEventListener("click", toggleRail);
document.addEventListener("keydown", (event) => {
  if (event.key === "[" && !event.ctrlKey && !event.metaKey && !isTyping(event)) toggleRail();
});
addCommands(() => themeNames.map((name) => ({
  label: `Theme: ${name}`, kind: "Setting", icon: { system: "monitor", light: "sun", dark: "moon" }[name], run: () => setTheme(name),
})));
addCommands(() => [{ label: "Collapse or expand the navigation", kind: "Setting", icon: "panel-left", run: toggleRail }]);
startPalette();
startTableKeys();
startStateLine();
