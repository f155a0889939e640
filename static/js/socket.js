// A websocket that comes back: typed JSON frames, backoff with jitter, a state that can be shown.

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15000;
const REFUSED = new Set([4401, 4403]); // signed out, or no permission: trying again cannot help

/** Wait before attempt n (from 1): 0.5, 1, 2 ... 15 s, each between 50 and 100 % so tabs spread out. */
export function backoffMs(attempt, random = Math.random()) {
  const ceiling = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** (attempt - 1));
  return Math.round(ceiling * (0.5 + random / 2));
}

/**
 * Events: "state" (see `state`), "frame" with the parsed frame in `detail`.
 * `state` is {name: "connecting" | "open" | "waiting" | "refused", since, retryAt, attempt}, in ms.
 */
export class LiveSocket extends EventTarget {
  constructor(path) {
    super();
    this.url = new URL(path, location.href.replace(/^http/, "ws")).href;
    this.state = { name: "connecting", since: Date.now(), retryAt: 0, attempt: 0 };
    this._socket = null;
    this._timer = 0;
    addEventListener("online", () => this._retryNow());
    document.addEventListener("visibilitychange", () => document.hidden || this._retryNow());
    this._connect();
  }

  /** Sends a frame; false when the socket is not open, and then nothing was sent. */
  send(frame) {
    if (this.state.name !== "open") return false;
    this._socket.send(JSON.stringify(frame));
    return true;
  }

  close() {
    clearTimeout(this._timer);
    this._setState("refused", 0);
    this._socket?.close();
  }

  _connect() {
    const socket = new WebSocket(this.url);
    this._socket = socket;
    socket.onopen = () => this._setState("open", 0);
    socket.onmessage = (event) => {
      this.dispatchEvent(new CustomEvent("frame", { detail: JSON.parse(event.data) }));
    };
    socket.onclose = (event) => {
      if (this.state.name === "refused") return;
      if (REFUSED.has(event.code)) this._setState("refused", 0);
      else this._waitAndRetry();
    };
  }

  _waitAndRetry() {
    const attempt = this.state.name === "open" ? 1 : this.state.attempt + 1;
    const wait = backoffMs(attempt);
    this._setState("waiting", attempt, Date.now() + wait);
    this._timer = setTimeout(() => this._retryNow(), wait);
  }

  _retryNow() {
    if (this.state.name !== "waiting") return;
    clearTimeout(this._timer);
    this._setState("connecting", this.state.attempt);
    this._connect();
  }

  _setState(name, attempt, retryAt = 0) {
    const since = isLost(name) && isLost(this.state.name) ? this.state.since : Date.now();
    this.state = { name, attempt, retryAt, since };
    this.dispatchEvent(new CustomEvent("state", { detail: this.state }));
  }
}

function isLost(name) {
  return name === "waiting" || name === "connecting";
}
