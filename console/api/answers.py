"""JSON answers, encoded by msgspec: lists of logprobs and hidden states are long."""

from __future__ import annotations

from typing import Any

import msgspec
from django.http import HttpResponse


def json_answer(data: Any, *, status: int = 200) -> HttpResponse:
    return HttpResponse(msgspec.json.encode(data), content_type="application/json", status=status)
