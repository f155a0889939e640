// Playground page: composer, transcript, routes and parameters around the chat streams.

import { get } from "./api.js";
import { ChatClient, newId } from "./chat-client.js";
import { isLive, tokenCount } from "./chat-stream.js";
import { ConversationList } from "./conversations.js";
import { fill, h, icon, jsonScript, setData } from "./dom.js";
import { plural } from "./format.js";
import { addCommands } from "./palette.js";
import { Params } from "./params.js";
import { RoutePicker } from "./routes.js";
import { Transcript } from "./transcript.js";

const TITLE_LENGTH = 60;
const TALLEST_INPUT_PX = 240;
const START = 0; // as a parent: before the first question

const page = document.getElementById("playground");
const composer = document.getElementById("composer");
const input = composer.elements.text;
const opened = jsonScript("conversation-data");

const client = new ChatClient();
const params = new Params(document.getElementById("params"));
const picker = new RoutePicker(document.getElementById("routes"), new URLSearchParams(location.search).get("route"));
const conversations = new ConversationList(document.getElementById("conversations"), opened?.id ?? null);
const transcript = new Transcript({
  scroller: document.getElementById("transcript"), list: document.getElementById("turns"), toEnd: document.getElementById("to-end"),
  onSend: sendAt, onBranch: showBranch, onLead: goOnFrom,
});

// Where the next question goes: behind message `parent` of `conversation` (null: a new one).
let place = { conversation: opened?.id ?? null, parent: null };
let stored = opened?.messages ?? []; // as the server has them

// -- sending and stopping --

function send(text, routes, at) {
  if (client.live().length) return refuse("One answer at a time: stop the running one first (Esc).");
  const { params: sent, problem } = params.read();
  if (problem) {
    showSide(true);
    return refuse(problem);
  }
  if (!routes.length) return refuse("Choose at least one worker or rank.");
  refuse("");
  const turn = newId(); // answers of one turn share the question, so each route gets the same prompt
  const compare = routes.length > 1;
  const answers = routes.map((route) => client.start({ turn, compare, text, route, params: sent, ...at }));
  transcript.add(text, answers, at);
  document.getElementById("no-turns").hidden = true;
  transcript.toEnd(true);
  drawComposer();
  return true;
}

/** Asks anew at the place of an earlier turn: a branch beside it. */
function sendAt(text, turn) {
  const at = { conversation: place.conversation, parent: turn.place.parent ?? START };
  if (!send(text, turn.answers.length > 1 ? turn.answers.map(({ route }) => route) : picker.routes(), at)) return;
  const sent = transcript.turns.pop();
  transcript.cutFrom(turn);
  transcript.turns.push(sent);
}

function stopAll() {
  for (const answer of client.live()) client.stop(answer);
}

function submit() {
  const text = input.value.trim();
  if (!text || !send(text, picker.routes(), place)) return;
  input.value = "";
  fitInput();
  drawComposer();
}

// -- composer --

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  if (client.live().length) stopAll();
  else submit();
});
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit();
  else if (event.key !== "ArrowUp" || input.value || !transcript.editLast()) return;
  event.preventDefault();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (narrow && closePanels()) return;
  stopAll();
});
input.addEventListener("input", () => {
  fitInput();
  drawComposer();
});

function fitInput() {
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight + 2, TALLEST_INPUT_PX)}px`;
}

function drawComposer() {
  const button = composer.querySelector("button[type=submit]");
  const live = client.live();
  const stopping = live.length > 0 && live.every(({ phase }) => phase === "stopping");
  button.disabled = stopping || (!live.length && !input.value.trim());
  const shown = live.length ? "Stop" : "Send";
  if (button.dataset.shown === shown) return;
  button.dataset.shown = shown;
  button.classList.toggle("primary", !live.length);
  button.replaceChildren(icon(live.length ? "stop" : "send"), shown, h("kbd", {}, live.length ? "Esc" : "Ctrl ⏎"));
}

// -- news from the streams --

client.addEventListener("answer", ({ detail: answer }) => {
  transcript.changed(answer);
  if (answer.next === 1) began(answer);
  if (!isLive(answer)) ended(answer);
  drawComposer();
});

function began(answer) {
  if (answer.conversation === null) return; // chats of API keys are not stored
  const turn = transcript.turns.find(({ answers }) => answers.includes(answer));
  if (!turn) return;
  if (place.conversation !== answer.conversation) {
    history.replaceState(null, "", `/playground/${answer.conversation}/`);
    conversations.setCurrent(answer.conversation);
  }
  conversations.touch(answer.conversation, turn.text.slice(0, TITLE_LENGTH));
  if (turn.lead === answer) goOnFrom(answer);
}

function goOnFrom(answer) {
  place = { conversation: answer.conversation ?? place.conversation, parent: answer.message };
}

function ended(answer) {
  const words = { done: "Answer finished", stopped: "Answer stopped", failed: "Answer failed", lost: "Answer lost" }[answer.phase];
  if (words) say(`${words}, ${plural(tokenCount(answer), "token")}.`);
  if (client.live().length) return;
  refuse("");
  refreshBranches();
}

client.addEventListener("refused", ({ detail: error }) => refuse(error.message));
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

/** For those who cannot see the transcript. */
function say(text) {
  document.getElementById("playground-status").textContent = text;
}

/** Why nothing was sent, beside the button; "" takes it away. Always false. */
function refuse(text) {
  document.getElementById("playground-say").textContent = text;
  return false;
}

// -- the stored conversation --

/** After an answer the server knows more: ids, branches. What is on screen stays as it is. */
async function refreshBranches() {
  if (place.conversation === null) return;
  try {
    const found = await get(`/api/conversations/${place.conversation}`);
    stored = found.messages;
    document.title = `${found.title} · Quarterdeck`;
    transcript.fillLost(stored);
    transcript.setBranches(stored, place.parent);
  } catch (error) {
    refuse(`The versions of this conversation cannot be shown: ${error.message}`);
  }
}

function showBranch(head) {
  place = { ...place, parent: head };
  transcript.showStored(place.conversation, stored, head);
  transcript.toEnd(true);
}

function open() {
  if (opened) showBranch(stored.at(-1)?.id ?? null);
  for (const { answer, text } of client.restore()) {
    if (answer.conversation !== place.conversation || transcript.putLive(answer)) continue;
    transcript.add(text, [answer], place);
    if (answer.message !== null) goOnFrom(answer);
  }
  document.getElementById("no-turns").hidden = transcript.turns.length > 0;
  transcript.toEnd(true);
  drawComposer();
}

// -- panels --

function showPanel(name, isOpen) {
  setData(page, name, isOpen ? "open" : "closed");
  document.getElementById(`toggle-${name}`).setAttribute("aria-expanded", String(isOpen));
  if (!narrow) localStorage.setItem(`qd.${name}`, isOpen ? "open" : "closed");
}

function searchConversations() {
  showPanel("list", true);
  conversations.search.focus();
}

function showSide(isOpen) {
  showPanel("side", isOpen);
}

const narrow = matchMedia("(max-width: 1000px)").matches;
for (const name of ["side", "list"]) {
  showPanel(name, !narrow && localStorage.getItem(`qd.${name}`) !== "closed");
  document.getElementById(`toggle-${name}`).addEventListener("click", () => {
    const isOpen = page.dataset[name] !== "open";
    if (narrow) closePanels();
    showPanel(name, isOpen);
  });
}

/** On a narrow screen the panels lie over the transcript: Esc takes them away; true if one was open. */
function closePanels() {
  const open = ["side", "list"].filter((name) => page.dataset[name] === "open");
  for (const name of open) {
    const within = document.getElementById(document.getElementById(`toggle-${name}`).getAttribute("aria-controls")).contains(document.activeElement);
    showPanel(name, false);
    if (within) document.getElementById(`toggle-${name}`).focus();
  }
  return open.length > 0;
}
addCommands(() => [
  { label: "New conversation", kind: "Playground", icon: "plus", run: () => { location.href = "/playground/"; } },
  { label: "Stop all answers", kind: "Playground", icon: "stop", run: stopAll },
  { label: "Search conversations", kind: "Playground", icon: "search", run: searchConversations },
  ...(transcript.turns.length ? [
    { label: "Edit the last question", kind: "Playground", icon: "pencil", run: () => transcript.editLast() },
    { label: "Regenerate the last answer", kind: "Playground", icon: "undo", run: () => sendAt(transcript.turns.at(-1).text, transcript.turns.at(-1)) },
  ] : []),
]);

open();
drawConnection();
setInterval(() => client.connection.name === "waiting" && drawConnection(), 1000);
if (!narrow) input.focus();
