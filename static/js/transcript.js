// The turns on screen: questions that can be edited, answers, and the ways between branches.

import "./answer-view.js";
import { storedAnswer } from "./chat-stream.js";
import { fill, fromTemplate, h, setData } from "./dom.js";
import { routeName } from "./routes.js";
import { newestBelow, turnsOf } from "./tree.js";

const NEAR_END_PX = 80;

export class Transcript {
  /** `onSend(text, turn)` asks anew at the place of `turn`; `onBranch(head)` shows another branch. */
  constructor({ scroller, list, toEnd, onSend, onBranch }) {
    Object.assign(this, { scroller, list, onSend, onBranch });
    this.turns = []; // {element, text, place: {conversation, parent}, answers}
    this.views = new Map(); // answer -> <qd-answer>
    this.follow = true; // sticks to the end until the user scrolls up
    scroller.addEventListener("scroll", () => {
      this.follow = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_END_PX;
      toEnd.hidden = this.follow;
    });
    toEnd.addEventListener("click", () => this.toEnd(true));
    list.addEventListener("qd-grown", () => this.toEnd());
  }

  toEnd(always = false) {
    if (always) this.follow = true;
    if (this.follow) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  /** Adds a turn; `place` is what its question stands behind. */
  add(text, answers, place) {
    const element = fromTemplate("turn");
    const turn = { element, text, place, answers };
    fill(element, { text });
    setData(element, "columns", answers.length);
    for (const answer of answers) element.querySelector(".answers").append(this._view(answer, turn));
    element.querySelector("[data-do=edit]").addEventListener("click", () => this._edit(turn));
    for (const step of [-1, 1]) {
      element.querySelector(`[data-step="${step}"]`).addEventListener("click", () => this._toRival(turn, step));
    }
    this.turns.push(turn);
    this.list.append(element);
    return turn;
  }

  /** Takes `turn` and all behind it off the screen. */
  cutFrom(turn) {
    const at = this.turns.indexOf(turn);
    if (at < 0) return;
    for (const { element } of this.turns.splice(at)) element.remove();
  }

  /** Shows the stored branch that ends in `head`. */
  showStored(conversation, messages, head) {
    this.turns = [];
    this.list.replaceChildren();
    for (const { user, answer } of turnsOf(messages, head)) {
      this.add(user.text, answer ? [storedAnswer(answer)] : [], { conversation, parent: user.parent_id });
    }
    this.setBranches(messages, head);
  }

  /** Numbers of branches beside the questions, where there are several. */
  setBranches(messages, head) {
    const stored = turnsOf(messages, head);
    if (stored.length !== this.turns.length) return;
    stored.forEach(({ rivals, at }, index) => {
      const turn = this.turns[index];
      Object.assign(turn, { rivals, at, messages });
      turn.element.querySelector(".branches").hidden = rivals.length < 2;
      fill(turn.element, { branch: `${at + 1} of ${rivals.length}` });
    });
  }

  /** Puts a live answer where its stored, unfinished form is shown; false when it is not. */
  putLive(answer) {
    for (const turn of this.turns) {
      const at = turn.answers.findIndex(({ message }) => message !== null && message === answer.message);
      if (at < 0) continue;
      const old = this.views.get(turn.answers[at]);
      turn.answers[at] = answer;
      old.replaceWith(this._view(answer, turn));
      return true;
    }
    return false;
  }

  changed(answer) {
    this.views.get(answer)?.changed();
  }

  _view(answer, turn) {
    const view = document.createElement("qd-answer");
    this.views.set(answer, view);
    view.bind(answer, { sendAgain: () => this.onSend(turn.text, turn) });
    if (turn.answers.length > 1) view.prepend(h("h3", { class: "column-name" }, routeName(answer.route)));
    return view;
  }

  _toRival(turn, step) {
    const rival = turn.rivals[(turn.at + step + turn.rivals.length) % turn.rivals.length];
    this.onBranch(newestBelow(turn.messages, rival));
  }

  /** The question becomes a text field; sending it makes a branch. */
  _edit(turn) {
    const question = turn.element.querySelector(".question");
    if (turn.element.querySelector(".edit")) return;
    const field = h("textarea", { class: "input", rows: Math.min(10, turn.text.split("\n").length + 1), "aria-label": "Edit the message" });
    field.value = turn.text;
    const close = () => {
      form.remove();
      question.hidden = false;
    };
    const form = h("form", { class: "edit", onsubmit: (event) => {
      event.preventDefault();
      if (field.value.trim()) this.onSend(field.value.trim(), turn);
    } }, field, h("div", { class: "row" }, h("button", { type: "button", class: "button push", onclick: close }, "Cancel"), h("button", { class: "button primary" }, "Send edited")));
    form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
      if (event.key === "Escape") close();
      event.stopPropagation();
    });
    question.hidden = true;
    question.after(form);
    field.focus();
  }
}
