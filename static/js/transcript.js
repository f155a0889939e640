// The turns on screen: questions that can be edited, answers, and the ways between branches.

import "./answer-view.js";
import { storedAnswer } from "./chat-stream.js";
import { fill, fromTemplate, h, icon, setData } from "./dom.js";
import { routeName } from "./routes.js";
import { newestBelow, turnsOf } from "./tree.js";

const NEAR_END_PX = 80;

export class Transcript {
  /**
   * `onSend(text, turn)` asks anew at the place of `turn`; `onBranch(head)` shows another branch;
   * `onLead(answer)` goes on from one answer of a comparison.
   */
  constructor({ scroller, list, toEnd, onSend, onBranch, onLead }) {
    Object.assign(this, { scroller, list, onSend, onBranch, onLead });
    this.turns = []; // {element, text, place: {conversation, parent}, answers, lead}
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
    const turn = { element, text, place, answers, lead: answers[0] ?? null };
    fill(element, { text });
    setData(element, "columns", answers.length);
    for (const answer of answers) element.querySelector(".answers").append(this._view(answer, turn));
    element.querySelector("[data-do=edit]").addEventListener("click", () => this._edit(turn));
    for (const step of [-1, 1]) {
      element.querySelector(`[data-step="${step}"]`).addEventListener("click", () => this._toRival(turn, step));
    }
    this._markLead(turn, turn.lead);
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
    for (const { user, answers, lead } of turnsOf(messages, head)) {
      const turn = this.add(user.text, answers.map(storedAnswer), { conversation, parent: user.parent });
      this._markLead(turn, turn.answers.find(({ message }) => message === lead?.id) ?? null);
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
      if (turn.lead === null || turn.lead.message === answer.message) turn.lead = answer;
      old.replaceWith(this._view(answer, turn));
      this._markLead(turn, turn.lead);
      return true;
    }
    return false;
  }

  /** Answers whose stream was gone become what the server stored of them. */
  fillLost(messages) {
    const known = new Map(messages.map((message) => [message.id, message]));
    for (const answer of this.turns.flatMap(({ answers }) => answers)) {
      const message = known.get(answer.message);
      if (answer.phase !== "lost" || !message || message.state === "running") continue;
      Object.assign(answer, storedAnswer(message), { conversation: answer.conversation });
      this.changed(answer);
    }
  }

  changed(answer) {
    this.views.get(answer)?.changed();
  }

  _view(answer, turn) {
    const view = document.createElement("qd-answer");
    this.views.set(answer, view);
    view.bind(answer, { sendAgain: () => this.onSend(turn.text, turn) });
    if (turn.answers.length > 1) view.prepend(this._columnHead(answer, turn));
    return view;
  }

  _columnHead(answer, turn) {
    const go = h("button", { type: "button", class: "button quiet", title: "What you send next goes on from this answer", onclick: () => {
      this._markLead(turn, answer);
      this.onLead(answer);
    } }, icon("continue"), "Go on from here");
    return h("div", { class: "column-head" }, h("h3", {}, routeName(answer.route)), go);
  }

  _markLead(turn, answer) {
    turn.lead = answer;
    if (turn.answers.length < 2) return;
    for (const one of turn.answers) this.views.get(one).querySelector(".column-head button").setAttribute("aria-pressed", String(one === answer));
  }

  /** Opens the newest question for editing; false when there is none. */
  editLast() {
    const turn = this.turns.at(-1);
    if (turn) this._edit(turn);
    return turn !== undefined;
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
