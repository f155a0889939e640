"""One trace event as the merge sees it, and what must change when ranks share a document.

Path: reader.py -> here -> part.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import nan

import msgspec
from msgspec import UNSET, Raw, UnsetType

Optional = Raw | UnsetType
FlowKey = tuple[int | str | UnsetType, str | UnsetType, bytes]

FLOW_PHASES = "stf"
MAX_TRACKED_FLOWS = 50_000  # ids of one segment; our own segments have at most 20,000 events
ID_BITS = 32  # ids below 2**32 keep their value in the low bits; JavaScript counts up to 2**53
MAX_PLAIN_ID = (1 << ID_BITS) - 1
MAX_NAMESPACES = 1 << 20


class Event(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """Every field of the Chrome trace format, in the order in which torch writes them.

    What the merge leaves alone stays raw bytes. ``pid`` and ``tid`` are numbers or words. ``ts`` is
    in microseconds; NaN means it is absent.
    """

    ph: str
    cat: str | UnsetType = UNSET
    name: Optional = UNSET
    pid: int | str = ""
    tid: int | str = ""
    ts: float = nan
    dur: Optional = UNSET
    args: Optional = UNSET
    id: int | str | UnsetType = UNSET
    bp: Optional = UNSET
    s: Optional = UNSET
    bind_id: int | str | UnsetType = UNSET
    id2: dict[str, int | str] | UnsetType = UNSET
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


class LooseEvent(Event, forbid_unknown_fields=False, gc=False):
    """The same for a file with fields that no version of the format has; they are dropped."""


class IdSpace:
    """Makes the ids of one segment unique in the merged document.

    A profiler session counts its ids from the start, so ids are unique per segment, not per rank.
    """

    def __init__(self, namespace: int) -> None:
        if not 0 <= namespace < MAX_NAMESPACES:
            raise ValueError(f"namespace {namespace} is not below {MAX_NAMESPACES}")
        self._first = namespace << ID_BITS
        self._key = b"%d" % namespace

    def rename(self, event: Event) -> None:
        """Rewrites ``id``, ``bind_id`` and the global part of ``id2``."""
        if type(event.id) is int and 0 <= event.id <= MAX_PLAIN_ID:
            event.id |= self._first  # nearly all of them
        elif event.id is not UNSET:
            event.id = self._unique(event.id)
        if event.bind_id is not UNSET:
            event.bind_id = self._unique(event.bind_id)
        if event.id2 is not UNSET and "global" in event.id2:  # a local id belongs to its process
            event.id2["global"] = self._unique(event.id2["global"])

    def _unique(self, value: int | str) -> int | str:
        """Small numbers stay readable; anything else becomes 64 bits in the hexadecimal form that
        all viewers take for an id."""
        if isinstance(value, int) and 0 <= value <= MAX_PLAIN_ID:
            return value | self._first
        digest = hashlib.blake2b(repr(value).encode(), digest_size=8, key=self._key)
        return "0x" + digest.hexdigest()


class FlowPairs:
    """Lets a flow event pass once its other end was seen, so no arrow ends in nothing.

    Profilers cut arrows at the border of their window. Bounded: with more than
    ``MAX_TRACKED_FLOWS`` ids in one segment the pairs are no longer checked and all events pass.
    """

    def __init__(self) -> None:
        self._paired: set[FlowKey] = set()
        self._waiting: dict[FlowKey, list[Event]] = {}
        self.checked = True

    @property
    def unpaired(self) -> int:
        """Events that still wait for a partner; at the end of a segment they are left out."""
        return sum(len(events) for events in self._waiting.values())

    def push(self, event: Event) -> Sequence[Event]:
        """Events that may be written now, oldest first."""
        name = event.name
        key = (event.id, event.cat, b"" if name is UNSET else bytes(name))
        if key in self._paired or not self.checked:
            return (event,)
        waiting = self._waiting.get(key)
        if waiting is None:
            self._waiting[key] = [event]
            full = len(self._paired) + len(self._waiting) > MAX_TRACKED_FLOWS
            return self._give_up() if full else ()
        waiting.append(event)
        phases = [held.ph for held in waiting]
        if "s" not in phases or "f" not in phases:
            return ()
        del self._waiting[key]
        self._paired.add(key)
        return waiting

    def _give_up(self) -> list[Event]:
        held = [event for events in self._waiting.values() for event in events]
        self._waiting.clear()
        self._paired.clear()
        self.checked = False
        return held
