"""A vocabulary out of a list: token i says ``tokens[i]``."""

from __future__ import annotations

from collections.abc import Sequence

from engine.detokenizer.text import DecoderStyle


class ListVocabulary:
    """ByteLevel-like: the bytes of all tokens are one text. Tokens in ``special`` are special."""

    style: DecoderStyle = "lossy"
    drops_first_space = False

    def __init__(self, tokens: Sequence[str | bytes], special: Sequence[int] = ()) -> None:
        self._tokens = [t.encode() if isinstance(t, str) else t for t in tokens]
        self.special_ids = frozenset(special)

    def piece(self, token_id: int) -> bytes:
        return self._tokens[token_id] if token_id < len(self._tokens) else b""

    def is_byte(self, token_id: int) -> bool:
        return False

    def decode_known(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        hidden = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.piece(i) for i in ids if i not in hidden).decode(errors="replace")
