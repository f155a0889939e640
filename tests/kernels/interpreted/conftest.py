"""These files run in a process of their own, with TRITON_INTERPRET=1 before Triton is imported.

test_under_the_interpreter.py starts it. By hand it is
TRITON_INTERPRET=1 pytest tests/kernels/interpreted
"""

from __future__ import annotations

import pytest

from kernels.dispatch import INTERPRETED

collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    # sigmoid(-100) is 1 / (1 + inf): 0, as on a GPU; numpy alone finds that worth a word
    config.addinivalue_line("filterwarnings", "ignore:overflow encountered in exp$:RuntimeWarning")
