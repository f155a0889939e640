"""Single tokens for people to read. A model may know more ids than its tokenizer has names for."""

from __future__ import annotations

from engine.tokenizer import Tokenizer


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """The exact bytes of a token; none for an id that the tokenizer has no name for."""
    return tokenizer.token_bytes(token) if 0 <= token < tokenizer.vocab_size else b""


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The token's bytes as text; part of a character becomes U+FFFD."""
    return token_bytes(tokenizer, token).decode("utf-8", errors="replace")
