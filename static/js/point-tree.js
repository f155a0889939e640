// <qd-points>: the model's dump points as a tree of boxes that writes the globs of its form, and counts what they match.
//
// GET /lazy_dump_tensors/points -> {points: [{name, layer, kinds: [kind]}], form}  in execution order
// The form's own fields stay the truth: input[name=modules], input[name=layers], input[name=kinds].

import { get } from "./api.js";
import { fill, h } from "./dom.js";
import { collapsed, treeOf } from "./dump-tree.js";
import { count, plural } from "./format.js";
import { globsIn, namesMatching, namesUnder, selection, toggled } from "./point-globs.js";

const ONE = { inputs: "input", outputs: "output", weights: "weight", logits: "logits", kv: "kv" };

class PointTree extends HTMLElement {
  async connectedCallback() {
    this.form = this.closest("form");
    this.boxes = []; // {box, node, told} of what is drawn
    this.points = [];
    try {
      const found = await get("/lazy_dump_tensors/points");
      this.points = found.points;
      this.root = treeOf(this.points.map(({ name }) => ({ path: name })));
      this.list.replaceChildren(...collapsed(this.root).map((node) => this.item(node)));
      this.form.addEventListener("input", () => this.count());
      this.count();
    } catch (error) {
      fill(this, { count: `The points cannot be listed: ${error.message} Globs work all the same.` });
    }
  }

  get list() {
    return this.querySelector(".tree");
  }

  field(name) {
    return this.form.elements[name];
  }

  /** A branch draws what is below it when it is opened first. */
  item(node) {
    const box = h("input", { type: "checkbox", "aria-label": node.path, oninput: (event) => this.toggle(event, node, box.checked) });
    const told = h("span", { class: "small faint push" });
    this.boxes.push({ box, node, told, names: namesUnder(this.inTree(node), this.points) });
    const label = h("label", { class: "point" }, box, h("span", { class: "mono" }, node.name), told);
    if (!node.children.length) return h("li", {}, label);
    const below = h("ul", {});
    const branch = h("details", {}, h("summary", {}, label), below);
    branch.addEventListener("toggle", () => {
      if (!branch.open || below.children.length) return;
      below.append(...node.children.map((child) => this.item(child)));
      this.mark();
    });
    branch.open = !node.path.includes(".");
    return h("li", {}, branch);
  }

  /** The node of the whole tree that a drawn one, whose chains are one line, stands for. */
  inTree(node) {
    return node.path.split(".").reduce((at, name) => at.children.get(name), this.root);
  }

  /** The box's own event ends here: the field speaks for it. */
  toggle(event, node, on) {
    event.stopPropagation();
    const modules = this.field("modules");
    modules.value = toggled(modules.value, this.root, this.inTree(node), this.points, on);
    modules.dispatchEvent(new Event("input", { bubbles: true }));
  }

  count() {
    const kinds = [...this.form.querySelectorAll("[name=kinds]:checked")].map(({ value }) => ONE[value] ?? value);
    const { points, tensors, problems } = selection(this.points, { modules: this.field("modules").value, layers: this.field("layers").value, kinds });
    fill(this, { count: `${count(points.length)} of ${plural(this.points.length, "point")}, ${plural(tensors, "tensor")} of each request and step` });
    for (const name of ["modules", "layers"]) this.say(name, problems[name]);
    this.mark();
  }

  /** Shows what is wrong at the field itself, and keeps the form from being sent. */
  say(name, problem) {
    const field = this.field(name);
    const line = this.form.querySelector(`#a-${name}-problem`);
    const shown = field.value.trim() ? problem : "";
    field.setCustomValidity(problem);
    field.setAttribute("aria-invalid", String(Boolean(shown)));
    line.textContent = shown;
    line.hidden = !shown;
  }

  mark() {
    const names = namesMatching(this.points, globsIn(this.field("modules").value));
    for (const { box, told, names: under } of this.boxes) {
      const chosen = under.filter((name) => names.has(name)).length;
      box.checked = chosen === under.length;
      box.indeterminate = chosen > 0 && chosen < under.length;
      told.textContent = under.length > 1 ? `${chosen} of ${under.length}` : "";
    }
  }
}

customElements.define("qd-points", PointTree);
