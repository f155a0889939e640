// Playground page: composer, transcript, routes and parameters around the chat streams.

import "./answer-view.js";
import { ChatClient, newId } from "./chat-client.js";
import { isLive, storedAnswer, tokenCount } from "./chat-stream.js";
import { ConversationList } from "./conversations.js";
import { fill, fromTemplate, h, icon, jsonScript, setData } from "./dom.js";
import { plural } from "./format.js";
import { addCommands } from "./palette.js";
import { Params } from "./params.js";
import { RoutePicker, routeName } from "./routes.js";
import { turnsOf } from "./tree.js";

const NEAR_END_PX = 80;
const TITLE_LENGTH = 60;

const page = document.getElementById("playground");
const scroller = document.getElementById("transcript");
const list = document.getElementById("turns");
const composer = document.getElementById("composer");
const input = composer.elements.text;
const stored = jsonScript("conversation-data");

const client = new ChatClient();
const params = new Params(document.getElementById("params"));
const picker = new RoutePicker(document.getElementById("routes"), new URLSearchParams(location.search).get("route"));
const conversations = new ConversationList(document.getElementById("conversations"), stored?.id ?? null);

let conversation = stored?.id ?? null;
let follow = true; // the transcript sticks to its end until the user scrolls up
const views = new Map(); // answer -> <qd-answer>

// -- transcript --

function addTurn(text, answers) {
  const turn = fromTemplate("turn");
  fill(turn, { text });
  setData(turn, "columns", answers.length);
  const box = turn.querySelector(".answers");
  for (const answer of answers) box.append(answerView(answer, text, answers.length > 1));
  list.append(turn);
  document.getElementById("no-turns").hidden = true;
  return turn;
}

function answerView(answer, text, named) {
  const view = document.createElement("qd-answer");
  views.set(answer, view);
  view.bind(answer, { regenerate: () => send(text, [answer.route]) });
  if (named) view.prepend(h("h3", { class: "column-name" }, routeName(answer.route)));
  return view;
}

function showStored() {
  for (const { user, answers } of turnsOf(stored?.messages ?? [])) addTurn(user.text, answers.map(storedAnswer));
}

/** Answers that were live when the page went away: into their stored place, or as a turn of their own. */
function showRestored() {
  for (const { answer, text } of client.restore()) {
    if (answer.conversation !== conversation) continue;
    const place = [...views.keys()].find((one) => one.message !== null && one.message === answer.message);
    if (place) {
      views.get(place).replaceWith(answerView(answer, "", false));
      views.delete(place);
    } else addTurn(text ?? "", [answer]);
  }
}

function toEnd() {
  if (follow) scroller.scrollTop = scroller.scrollHeight;
}

scroller.addEventListener("scroll", () => {
  const left = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
  follow = left < NEAR_END_PX;
  document.getElementById("to-end").hidden = follow;
});
document.getElementById("to-end").addEventListener("click", () => {
  follow = true;
  toEnd();
});
list.addEventListener("qd-grown", toEnd);

// -- sending and stopping --

function send(text, routes) {
  const sent = params.read();
  if (!sent) {
    showSide(true);
    return false;
  }
  if (!routes.length) {
    say("Choose at least one worker or rank to compare.");
    return false;
  }
  const turn = newId();
  const compare = routes.length > 1;
  const answers = routes.map((route) => client.start({ turn, compare, text, route, params: sent, conversation }));
  follow = true;
  addTurn(text, answers);
  toEnd();
  drawComposer();
  return true;
}

function stopAll() {
  for (const answer of client.live()) client.stop(answer);
}

function submit() {
  const text = input.value.trim();
  if (!text || client.live().length) return;
  if (send(text, picker.routes())) {
    input.value = "";
    fitInput();
    drawComposer();
  }
}

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  if (client.live().length) stopAll();
  else submit();
});
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    submit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]") && client.live().length) stopAll();
});
input.addEventListener("input", () => {
  fitInput();
  drawComposer();
});

function fitInput() {
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight + 2, 240)}px`;
}

function drawComposer() {
  const live = client.live().length > 0;
  const button = composer.querySelector("button[type=submit]");
  button.disabled = !live && !input.value.trim();
  const stopping = live && client.live().every((answer) => answer.phase === "stopping");
  if (button.dataset.live === String(live) && !stopping) return;
  button.dataset.live = String(live);
  button.classList.toggle("primary", !live);
  button.disabled = stopping || (!live && !input.value.trim());
  button.replaceChildren(icon(live ? "stop" : "send"), live ? "Stop" : "Send", h("kbd", {}, live ? "Esc" : "Ctrl ⏎"));
}

// -- news from the streams --

client.addEventListener("answer", ({ detail: answer }) => {
  views.get(answer)?.changed();
  if (answer.conversation !== null && answer.next === 1) began(answer);
  if (!isLive(answer)) ended(answer);
  drawComposer();
});

function began(answer) {
  const title = list.lastElementChild?.querySelector("[data-f=text]").textContent.slice(0, TITLE_LENGTH) ?? "";
  if (conversation === null) {
    conversation = answer.conversation;
    history.replaceState(null, "", `/playground/${conversation}/`);
  }
  conversations.touch(answer.conversation, title);
}

function ended(answer) {
  const words = { done: "Answer finished", stopped: "Answer stopped", failed: "Answer failed", lost: "Answer lost" }[answer.phase];
  if (words) say(`${words}, ${plural(tokenCount(answer), "token")}.`);
}

client.addEventListener("refused", ({ detail: error }) => say(error.message));
client.addEventListener("connection", drawConnection);

function drawConnection() {
  const box = document.getElementById("chat-connection");
  const { name, retryAt } = client.connection;
  const words = {
    open: "", connecting: "Connecting", refused: "Signed out: reload the page to sign in",
    waiting: `Not connected, next try in ${Math.max(1, Math.ceil((retryAt - Date.now()) / 1000))} s`,
  };
  box.hidden = name === "open";
  setData(box.querySelector(".dot"), "tone", name === "refused" ? "bad" : "warn");
  fill(box, { text: words[name] });
}

function say(text) {
  document.getElementById("playground-say").textContent = text;
}

// -- panels --

function showSide(open) {
  setData(page, "side", open ? "open" : "closed");
  document.getElementById("toggle-side").setAttribute("aria-expanded", String(open));
  localStorage.setItem("qd.side", open ? "open" : "closed");
}

function showList(open) {
  setData(page, "list", open ? "open" : "closed");
  document.getElementById("toggle-list").setAttribute("aria-expanded", String(open));
  localStorage.setItem("qd.list", open ? "open" : "closed");
}

const narrow = matchMedia("(max-width: 1000px)").matches;
showSide(narrow ? false : localStorage.getItem("qd.side") !== "closed");
showList(narrow ? false : localStorage.getItem("qd.list") !== "closed");
document.getElementById("toggle-side").addEventListener("click", () => showSide(page.dataset.side !== "open"));
document.getElementById("toggle-list").addEventListener("click", () => showList(page.dataset.list !== "open"));
addCommands(() => [
  { label: "New conversation", kind: "Playground", icon: "plus", run: () => { location.href = "/playground/"; } },
  { label: "Stop all answers", kind: "Playground", icon: "stop", run: stopAll },
]);

showStored();
showRestored();
drawConnection();
drawComposer();
toEnd();
setInterval(() => client.connection.name === "waiting" && drawConnection(), 1000);
if (!narrow) input.focus();
