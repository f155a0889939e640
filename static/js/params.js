// The parameters beside the playground: form fields to a `params` object and back, remembered.

const STORE_KEY = "qd.params";

const NUMBERS = {
  temperature: { min: 0, max: 2 }, top_p: { min: 0, max: 1, above: 0 }, top_k: { min: -1, whole: true },
  max_new_tokens: { min: 1, whole: true }, seed: { min: 0, whole: true },
};

/** {value} or {problem}: an empty field is no value, the model's own holds. */
export function readNumber(name, text) {
  const { min, max = Infinity, above = -Infinity, whole = false } = NUMBERS[name];
  if (text.trim() === "") return {};
  const value = Number(text);
  if (!Number.isFinite(value)) return { problem: "Enter a number." };
  if (whole && !Number.isInteger(value)) return { problem: "Enter a whole number." };
  if (value < min || value > max || value <= above) {
    return { problem: max === Infinity ? `At least ${min}.` : `From ${above === -Infinity ? min : `above ${above}`} to ${max}.` };
  }
  return { value };
}

/** Stop texts: one a line; "\n" and "\t" stand for the characters themselves. */
export function readStops(text) {
  return text.split("\n").filter((line) => line !== "").map((line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
}

export class Params {
  constructor(form) {
    this.form = form;
    this._load();
    form.addEventListener("input", (event) => this._check(event.target));
    form.addEventListener("change", () => this._store());
    form.addEventListener("reset", () => setTimeout(() => this._afterReset()));
  }

  /** {params} of a start frame, or {problem} in words when a field is wrong (it is then focused). */
  read() {
    const params = {};
    for (const name of Object.keys(NUMBERS)) {
      const field = this.form.elements[name];
      const { value, problem } = readNumber(name, field.value);
      if (problem) {
        this._check(field);
        field.focus();
        return { problem: `${field.labels[0].textContent}: ${problem}` };
      }
      if (value !== undefined) params[name] = value;
    }
    const stop = readStops(this.form.elements.stop.value);
    if (stop.length) params.stop = stop;
    if (this.form.elements.system.value.trim()) params.system = this.form.elements.system.value.trim();
    params.logprobs = this.form.elements.logprobs.checked;
    params.entropy = this.form.elements.entropy.checked;
    return { params };
  }

  _check(field) {
    if (!(field.name in NUMBERS)) return;
    const { problem } = readNumber(field.name, field.value);
    field.setAttribute("aria-invalid", String(Boolean(problem)));
    document.getElementById(`${field.id}-wrong`)?.remove();
    field.removeAttribute("aria-describedby");
    if (!problem) return;
    const words = document.createElement("p");
    Object.assign(words, { className: "wrong", id: `${field.id}-wrong`, textContent: problem });
    field.after(words);
    field.setAttribute("aria-describedby", `${field.id}-wrong`);
  }

  _afterReset() {
    for (const field of this._fields()) this._check(field);
    this._store();
  }

  _fields() {
    return [...this.form.elements].filter((field) => field.name && field.name !== "route");
  }

  _store() {
    const kept = Object.fromEntries(this._fields().map((field) => [field.name, field.type === "checkbox" ? field.checked : field.value]));
    localStorage.setItem(STORE_KEY, JSON.stringify(kept));
  }

  _load() {
    let kept = {};
    try {
      kept = JSON.parse(localStorage.getItem(STORE_KEY)) ?? {};
    } catch {
      localStorage.removeItem(STORE_KEY);
    }
    for (const field of this._fields()) {
      if (!(field.name in kept)) continue;
      if (field.type === "checkbox") field.checked = kept[field.name];
      else field.value = kept[field.name];
    }
  }
}
