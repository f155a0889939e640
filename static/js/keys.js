// Keys page: the create sheet, and a question before a key is revoked. The forms work without this.

import { addCommands } from "./palette.js";
import { confirmDanger } from "./prompts.js";

const sheet = document.getElementById("create-key");

if (sheet) {
  const open = () => sheet.showModal();
  document.getElementById("new-key").addEventListener("click", open);
  for (const button of sheet.querySelectorAll("[data-close]")) button.addEventListener("click", () => sheet.close());
  sheet.addEventListener("click", (event) => event.target === sheet && sheet.close());
  addCommands(() => [{ label: "Create key", kind: "Keys", icon: "plus", run: open }]);
  if ("open" in sheet.dataset) open();
}

for (const form of document.querySelectorAll("form[data-confirm]")) {
  form.addEventListener("submit", async (event) => {
    if (form.dataset.sure) return;
    event.preventDefault();
    if (!(await confirmDanger(form.dataset.confirm, form.dataset.text, form.dataset.confirm))) return;
    form.dataset.sure = "yes";
    form.requestSubmit();
  });
}
