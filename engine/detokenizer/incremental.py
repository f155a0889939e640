"""The detokenizer's core: token rows in, text rows out. Pure, given a vocabulary.

Path: process.py -> here -> process.py. One ``RequestText`` per live request, made by its first row
and removed by its terminal row.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.detokenizer.stops import StopScanner, hidden_stops
from engine.detokenizer.text import Vocabulary, is_at_start, open_stream
from engine.messages import (
    DecodeParams,
    Finish,
    OutputRow,
    StrRow,
    TokenIDRow,
    TopLogprobs,
    row_for,
)

SHARED_FIELDS = tuple(
    name for name in OutputRow.__struct_fields__ if name not in ("rid", "http_worker_ipc")
)


class RequestText:
    """The text of one request: what may be sent now, what must wait, where it is cut.

    What ``push`` and ``finish`` return concatenates to the text of the answer (see text.py),
    without the stop that ended it unless ``no_stop_trim``; however the ids were split into rows.
    """

    __slots__ = (
        "_drop_space",
        "_hidden_stops",
        "_scanner",
        "_sent",
        "_stream",
        "_unsent",
        "params",
    )

    def __init__(self, vocabulary: Vocabulary, params: DecodeParams) -> None:
        skip = params.skip_special_tokens
        self.params = params
        self._stream = open_stream(
            vocabulary, skip_special_tokens=skip, prompt_tail=params.prompt_tail
        )
        self._drop_space = is_at_start(vocabulary, params.prompt_tail, skip)
        self._unsent = ""
        self._sent = 0  # characters before ``_unsent``, a dropped first space included
        self._scanner: StopScanner | None = None
        self._hidden_stops: dict[int, str] = {}
        if (params.stop or params.stop_regex) and not params.no_stop_trim:
            self._scanner = StopScanner(params.stop, params.stop_regex)
            self._hidden_stops = hidden_stops(vocabulary, params.stop, skip)

    def push(self, ids: Sequence[int]) -> str:
        """Text that may be sent now."""
        text = self._stream.push(ids)
        if self._scanner is None:
            return self._without_first_space(text)
        self._scanner.feed(text)
        self._unsent += text
        return self._take(len(self._unsent) - self._scanner.hold_back())

    def finish(self, ids: Sequence[int], finish: Finish) -> str:
        """The rest. ``ids`` are those of the terminal row; the last of them completed the stop."""
        if finish.type == "stop" and not self.params.no_stop_trim:
            if isinstance(finish.matched, str):
                return self._cut_at_stop(ids)
            if ids and ids[-1] == finish.matched:
                ids = ids[:-1]
        self._unsent += self._stream.push(ids) + self._stream.flush()
        return self._take(len(self._unsent))

    def _cut_at_stop(self, ids: Sequence[int]) -> str:
        if self._scanner is None or not ids or ids[-1] in self._hidden_stops:
            self._unsent += self._stream.push(ids) + self._stream.flush()
            return self._take(len(self._unsent))
        before, text = self._stream.push(ids[:-1]), self._stream.push(ids[-1:])
        self._scanner.feed(before)
        match = self._scanner.feed(text, self._stream.peek())
        self._unsent += before + text + self._stream.flush()
        return self._take(match.start - self._sent if match else len(self._unsent))

    def _take(self, count: int) -> str:
        count = max(0, count)
        text, self._unsent = self._unsent[:count], self._unsent[count:]
        self._sent += len(text)
        return self._without_first_space(text)

    def _without_first_space(self, text: str) -> str:
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text


class Detokenizer:
    """Every live request's text. Rows of one rid come in order; other rids are independent."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.counters = {"rows": 0, "unknown_rows": 0, "unseen_ends": 0, "replaced": 0}
        self._vocabulary = vocabulary
        self._texts: dict[str, RequestText] = {}
        self._inboxes: dict[str, str] = {}  # of each rid in ``_texts``

    def __len__(self) -> int:
        return len(self._texts)

    def accept(self, row: TokenIDRow | StrRow) -> StrRow | None:
        """The row for the inbox; None for a row of a request that is over or never began.

        A terminal row without ids is always passed on: whoever made it (the router, a rank that
        failed before the first token) may know of a request that was never seen here.
        """
        self.counters["rows"] += 1
        request = self._request(row)
        if request is None:
            if row.finish is None or row.output_ids:
                self.counters["unknown_rows"] += 1
                return None
            self.counters["unseen_ends"] += 1
            return self._text_row(row, row.text if isinstance(row, StrRow) else "")
        if row.finish is None:
            text = request.push(row.output_ids)
        else:
            text = request.finish(row.output_ids, row.finish)
            self.forget(row.rid)
        if isinstance(row, StrRow):
            text += row.text
        answer = self._text_row(row, text)
        if request.params.return_bytes:
            answer.raw_bytes = self._bytes(row.output_ids, request.params.skip_special_tokens)
        if request.params.logprob_text:
            self._add_logprob_texts(answer)
        return answer

    def forget(self, rid: str) -> None:
        """Frees what is kept for ``rid``."""
        self._texts.pop(rid, None)
        self._inboxes.pop(rid, None)

    def forget_inbox(self, inbox: str) -> list[str]:
        """Frees every request of ``inbox``; their rids."""
        rids = [rid for rid, owner in self._inboxes.items() if owner == inbox]
        for rid in rids:
            self.forget(rid)
        return rids

    def _request(self, row: TokenIDRow | StrRow) -> RequestText | None:
        """State of the row's request; a first row (``decode`` is set) makes it."""
        if not isinstance(row, TokenIDRow) or row.decode is None:
            return self._texts.get(row.rid)
        if row.rid in self._texts:
            self.counters["replaced"] += 1
        request = RequestText(self._vocabulary, row.decode)
        self._texts[row.rid] = request
        self._inboxes[row.rid] = row.http_worker_ipc
        return request

    def _text_row(self, row: TokenIDRow | StrRow, text: str) -> StrRow:
        shared = {name: getattr(row, name) for name in SHARED_FIELDS}
        return row_for(row, StrRow, text=text, **shared)

    def _bytes(self, ids: Sequence[int], skip_special_tokens: bool) -> bytes:
        hidden = self._vocabulary.special_ids if skip_special_tokens else frozenset[int]()
        return b"".join(self._vocabulary.piece(i) for i in ids if i not in hidden)

    def _add_logprob_texts(self, row: StrRow) -> None:
        if row.output_logprobs is not None:
            row.output_logprobs.texts = self._token_texts(row.output_ids)
            self._add_candidate_texts(row.output_logprobs.top, row.output_logprobs.token_ids)
        if row.input_logprobs is not None:
            row.input_logprobs.texts = self._token_texts(row.input_logprobs.ids)
            self._add_candidate_texts(row.input_logprobs.top, row.input_logprobs.token_ids)

    def _add_candidate_texts(self, *families: TopLogprobs | None) -> None:
        for candidates in families:
            if candidates is not None:
                candidates.texts = [self._token_texts(ids) for ids in candidates.ids]

    def _token_texts(self, ids: Sequence[int]) -> list[str]:
        return [self._vocabulary.piece(i).decode(errors="replace") for i in ids]
