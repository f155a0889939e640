// Streams of this page over /ws/chat/: starts, stops, resumes after a lost socket or a reload.
// What a resume needs (stream id, next index, text so far) is kept in sessionStorage.

import { isLive, newAnswer, skipTo, takeFrame } from "./chat-stream.js";
import { LiveSocket } from "./socket.js";

const STORE_KEY = "qd.streams";
const STORE_EVERY_MS = 1000;
// What a resume is answered with when the frames are not there any more.
const FORGOTTEN = new Set(["stream_unknown", "not_found", "replay_gone"]);

/** Events: "answer" (detail: the answer that changed), "connection". */
export class ChatClient extends EventTarget {
  constructor(storage = sessionStorage) {
    super();
    this.storage = storage;
    this.answers = new Map(); // stream id -> {answer, start: frame to send, repairing}
    this.socket = new LiveSocket("/ws/chat/");
    this.socket.addEventListener("frame", (event) => this._take(event.detail));
    this.socket.addEventListener("state", () => this._connectionChanged());
    addEventListener("pagehide", () => this._store());
    setInterval(() => this.live().length && this._store(), STORE_EVERY_MS);
  }

  get connection() {
    return this.socket.state;
  }

  live() {
    return [...this.answers.values()].map((entry) => entry.answer).filter(isLive);
  }

  /** Sends a start frame (now, or as soon as the socket is open); gives the answer that will fill. */
  start({ turn, compare, text, route, params, conversation, parent }) {
    const stream = newId();
    const frame = { type: "start", stream, turn, compare, conversation, parent, text, route, params };
    const answer = newAnswer({ stream, route, conversation, sentAt: Date.now() });
    this.answers.set(stream, { answer, start: frame, sent: this.socket.send(frame), repairing: false });
    this._store();
    return answer;
  }

  stop(answer) {
    if (!isLive(answer)) return;
    answer.phase = "stopping";
    this.socket.send({ type: "stop", stream: answer.stream });
    this._changed(answer);
  }

  /** Answers of this tab that were live when the page went away: attaches to them again. */
  restore() {
    const kept = readStore(this.storage);
    for (const { answer, text } of kept) {
      this.answers.set(answer.stream, { answer, start: { text }, sent: true, repairing: false });
      this.socket.send({ type: "resume", stream: answer.stream, next: answer.next });
    }
    return kept;
  }

  _take(frame) {
    const entry = this.answers.get(frame.stream);
    if (!entry) {
      if (frame.type === "error") this.dispatchEvent(new CustomEvent("refused", { detail: frame.error }));
      return;
    }
    const { answer } = entry;
    if (frame.type === "error" && FORGOTTEN.has(frame.error.type)) this._forgotten(entry);
    else if (frame.type === "error" && frame.error.type === "taken_over") answer.phase = "elsewhere";
    else if (takeFrame(answer, frame) === "gap") this._repair(entry, frame);
    else if (frame.index !== undefined) entry.repairing = false;
    if (!isLive(answer)) this._store();
    this._changed(answer);
  }

  /** First gap: ask again from where we are. If the answer to that has the gap too, the frames are gone. */
  _repair(entry, frame) {
    const { answer } = entry;
    if (entry.repairing) {
      skipTo(answer, frame);
      entry.repairing = false;
      return;
    }
    entry.repairing = true;
    this.socket.send({ type: "resume", stream: answer.stream, next: answer.next });
  }

  /** The server does not know the stream: never arrived, or ended while we were away. */
  _forgotten(entry) {
    if (entry.answer.next === 0 && entry.start.type) this.socket.send(entry.start);
    else entry.answer.phase = "lost";
  }

  _connectionChanged() {
    if (this.connection.name === "open") {
      for (const entry of this.answers.values()) if (isLive(entry.answer)) this._attach(entry);
    }
    this.dispatchEvent(new Event("connection"));
  }

  _attach(entry) {
    const { answer, start } = entry;
    if (!entry.sent) entry.sent = this.socket.send(start);
    else this.socket.send({ type: "resume", stream: answer.stream, next: answer.next });
    if (answer.phase === "stopping") this.socket.send({ type: "stop", stream: answer.stream });
  }

  _changed(answer) {
    this.dispatchEvent(new CustomEvent("answer", { detail: answer }));
  }

  _store() {
    const kept = [...this.answers.values()].filter((entry) => isLive(entry.answer) && entry.sent)
      .map(({ answer, start }) => ({ answer, text: start.text }));
    try {
      if (kept.length) this.storage.setItem(STORE_KEY, JSON.stringify(kept));
      else this.storage.removeItem(STORE_KEY);
    } catch {
      this.storage.removeItem(STORE_KEY); // over quota: a reload then resumes from frame 0
    }
  }
}

/** What `_store` kept: [{answer, turn, text}]; an unreadable store is no store. */
function readStore(storage) {
  try {
    return JSON.parse(storage.getItem(STORE_KEY)) ?? [];
  } catch {
    return [];
  }
}

/** RFC 4122 version 4; crypto.randomUUID is missing on pages without https. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  bytes[6] = (bytes[6] & 0x0f) | 0x40;
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  const hex = [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return hex.replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, "$1-$2-$3-$4-$5");
}
