"""One trace event as the merge sees it, and what must change when ranks share a document.

Path: reader.py -> here -> part.py.
"""

from __future__ import annotations

import hashlib
from math import nan
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

Optional = Raw | UnsetType

FLOW_PHASES = "stf"
MAX_TRACKED_FLOWS = 50_000  # ids of one segment; our own segments have at most 20,000 events
ID_BITS = 32  # ids below 2**32 keep their value in the low bits; 2**53 is the limit of JavaScript
MAX_NAMESPACES = 1 << 20


class Event(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """Every field of the Chrome trace format. What the merge leaves alone stays raw bytes.

    ``pid`` and ``tid`` are numbers or words. ``ts`` is in microseconds; NaN means it is absent.
    """

    ph: str
    ts: float = nan
    pid: int | str = ""
    tid: int | str = ""
    name: Optional = UNSET
    cat: Optional = UNSET
    dur: Optional = UNSET
    id: Optional = UNSET
    bp: Optional = UNSET
    s: Optional = UNSET
    args: Optional = UNSET
    id2: Optional = UNSET
    bind_id: Optional = UNSET
    tts: Optional = UNSET
    tdur: Optional = UNSET
    cname: Optional = UNSET
    sf: Optional = UNSET
    stack: Optional = UNSET
    esf: Optional = UNSET
    estack: Optional = UNSET
    scope: Optional = UNSET
    flow_in: Optional = UNSET
    flow_out: Optional = UNSET


class LooseEvent(Event, forbid_unknown_fields=False):
    """The same for a file with fields that no version of the format has; they are dropped."""


class IdSpace:
    """Makes the ids of one segment unique in the merged document.

    A profiler session counts its ids from the start, so ids are unique per segment, not per rank.
    """

    def __init__(self, namespace: int) -> None:
        if not 0 <= namespace < MAX_NAMESPACES:
            raise ValueError(f"namespace {namespace} is not below {MAX_NAMESPACES}")
        self._namespace = namespace

    def rename(self, event: Event) -> None:
        """Rewrites ``id``, ``bind_id`` and the global part of ``id2``."""
        if not isinstance(event.id, UnsetType):
            event.id = self._scalar(event.id)
        if not isinstance(event.bind_id, UnsetType):
            event.bind_id = self._scalar(event.bind_id)
        if not isinstance(event.id2, UnsetType):
            ids: dict[str, Any] = msgspec.json.decode(event.id2, type=dict[str, Any])
            if "global" in ids:  # a local id belongs to its process, whose number is unique
                ids["global"] = self._hashed(msgspec.json.encode(ids["global"]))
            event.id2 = Raw(msgspec.json.encode(ids))

    def _scalar(self, raw: Raw) -> Raw:
        text = bytes(raw)
        if text.isdigit() and (number := int(text)) < 1 << ID_BITS:
            return Raw(b"%d" % (self._namespace << ID_BITS | number))
        return Raw(b'"%b"' % self._hashed(text).encode())

    def _hashed(self, text: bytes) -> str:
        """64 bits in the hexadecimal form that all viewers take for an id."""
        digest = hashlib.blake2b(text, digest_size=8, key=b"%d" % self._namespace)
        return "0x" + digest.hexdigest()


class FlowPairs:
    """Lets a flow event pass once its other end was seen, so no arrow ends in nothing.

    Profilers cut arrows at the border of their window. Bounded: with more than
    ``MAX_TRACKED_FLOWS`` ids in one segment the pairs are no longer checked and all events pass.
    """

    def __init__(self) -> None:
        self._paired: set[tuple[bytes, bytes, bytes]] = set()
        self._waiting: dict[tuple[bytes, bytes, bytes], list[Event]] = {}
        self.checked = True

    @property
    def unpaired(self) -> int:
        """Events that still wait for a partner; at the end of a segment they are left out."""
        return sum(len(events) for events in self._waiting.values())

    def push(self, event: Event) -> list[Event]:
        """Events that may be written now, oldest first."""
        if not self.checked:
            return [event]
        key = (_text(event.cat), _text(event.name), _text(event.id))
        if key in self._paired:
            return [event]
        waiting = self._waiting.setdefault(key, [])
        waiting.append(event)
        phases = {held.ph for held in waiting}
        if "s" in phases and "f" in phases:
            self._paired.add(key)
            return self._waiting.pop(key)
        if len(self._paired) + len(self._waiting) > MAX_TRACKED_FLOWS:
            return self._give_up()
        return []

    def _give_up(self) -> list[Event]:
        held = [event for events in self._waiting.values() for event in events]
        self._waiting.clear()
        self._paired.clear()
        self.checked = False
        return held


def _text(raw: Optional) -> bytes:
    return b"" if isinstance(raw, UnsetType) else bytes(raw)
