// Two rows of a list, chosen by their boxes; a link compares them, the older one first.

export class ChosenPair {
  /** `link` goes to `path`?a&b once two are chosen. */
  constructor(link, path) {
    Object.assign(this, { link, path });
    this.chosen = []; // {id, at}
  }

  /** Wires a row's box; `at` orders the two. */
  watch(box, id, at) {
    box.addEventListener("click", (event) => event.stopPropagation());
    box.addEventListener("change", () => this.choose({ id, at }, box.checked));
    box.checked = this.chosen.some((one) => one.id === id);
  }

  choose(item, on) {
    this.chosen = [...this.chosen.filter(({ id }) => id !== item.id), ...(on ? [item] : [])];
    const [a, b] = [...this.chosen].sort((one, other) => one.at - other.at);
    const ready = this.chosen.length === 2;
    this.link.setAttribute("aria-disabled", String(!ready));
    this.link.title = ready ? `${a.id} against ${b.id}` : `Choose two in the list, ${this.chosen.length} chosen`;
    if (ready) this.link.href = `${this.path}?a=${encodeURIComponent(a.id)}&b=${encodeURIComponent(b.id)}`;
    else this.link.removeAttribute("href");
  }
}
