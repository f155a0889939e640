// The one /ws/fleet/ subscription of a page: state line, fleet page and playground all read it.

import { jsonScript } from "./dom.js";
import { applyFrame } from "./fleet-state.js";
import { LiveSocket } from "./socket.js";

class FleetFeed extends EventTarget {
  constructor() {
    super();
    this.state = { snapshot: jsonScript("fleet-snapshot"), receivedAt: Date.now() / 1000, gap: false };
    this.socket = new LiveSocket("/ws/fleet/");
    this.socket.addEventListener("frame", (event) => this._take(event.detail));
    this.socket.addEventListener("state", () => this._connectionChanged());
    document.addEventListener("visibilitychange", () => this._tellRate());
  }

  get snapshot() {
    return this.state.snapshot;
  }

  get connection() {
    return this.socket.state;
  }

  _take(frame) {
    const askedAlready = this.state.gap;
    this.state = applyFrame(this.state, frame, Date.now() / 1000);
    if (this.state.gap) {
      if (!askedAlready) this.socket.send({ type: "snapshot" });
      return;
    }
    this.dispatchEvent(new Event("change"));
  }

  _connectionChanged() {
    if (this.connection.name === "open") this._tellRate();
    this.state = { ...this.state, gap: false };
    this.dispatchEvent(new Event("connection"));
  }

  _tellRate() {
    this.socket.send({ type: "rate", hidden: document.hidden });
  }
}

export const feed = new FleetFeed();
