"""How large a regex becomes when it is compiled, told from its source. Pure.

``regex`` unrolls counted repeats: ``a{50000000}`` takes gigabytes wherever it is compiled.
So sources are measured before.
"""

from __future__ import annotations

import math
import re

_ESCAPE = re.compile(r"\\.", re.DOTALL)
_COMMENT = re.compile(r"#[^\n]*")
_COUNT = re.compile(r"\{([\s0-9]*)(?:,[\s0-9]*)?\}")
_TOKEN = re.compile(rf"{_COUNT.pattern}|.", re.DOTALL)
_CLASS = re.compile(r"\[\^?[^\[\]]+\]")  # without a bracket in it


def regex_size(source: str) -> int:
    """At least as many pieces as ``source`` unrolls to: ``(?:ab{3}){10}`` has 40 and some.

    Comments and brackets in brackets mean different things in different modes; with one of them
    every count is taken to repeat all of the source.
    """
    bare = _CLASS.sub("c", _ESCAPE.sub("c", source))
    if "#" in source or "[" in bare:
        texts = (source, _COMMENT.sub("", source))
        return len(source) * max(math.prod(map(_count, _COUNT.findall(text))) for text in texts)
    return _unrolled(bare)


def _count(digits: str) -> int:
    """The smallest count of a repeat; blanks in it do not matter (verbose mode)."""
    return max(1, int("0" + "".join(digits.split())))


def _unrolled(source: str) -> int:
    """``source`` without escapes and classes: only groups and counts have structure."""
    pieces = [0]  # so far, of each open group
    last = 0  # of the newest item, which a count repeats
    for token in _TOKEN.finditer(source):
        if token[1] is not None:
            count = _count(token[1])
            pieces[-1] += last * (count - 1)
            last *= count
        elif token[0] == "(":
            pieces.append(0)
            last = 0
        elif token[0] == ")" and len(pieces) > 1:
            last = 1 + pieces.pop()
            pieces[-1] += last
        else:
            last = 1
            pieces[-1] += 1
    return sum(pieces)
