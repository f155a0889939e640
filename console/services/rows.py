"""Joining rows of one request without knowing their fields."""

from __future__ import annotations

from collections.abc import AsyncIterator

from engine.messages import StrRow, merge


def merge_all(rows: list[StrRow]) -> StrRow:
    """One row that says what ``rows`` said, in n log n: neighbours are merged pairwise."""
    while len(rows) > 1:
        pairs = zip(rows[0::2], rows[1::2], strict=False)
        odd = rows[-1:] if len(rows) % 2 else []
        rows = [merge(earlier, later) for earlier, later in pairs] + odd
    return rows[0]


async def collect(stream: AsyncIterator[tuple[int, StrRow]], count: int) -> list[StrRow]:
    """The whole answers of ``count`` requests, in their order."""
    parts: list[list[StrRow]] = [[] for _ in range(count)]
    async for index, row in stream:
        parts[index].append(row)
    return [merge_all(rows) for rows in parts]
