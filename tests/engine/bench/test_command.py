from __future__ import annotations

import json
import subprocess
import sys

from engine.config import CHECKOUT
from tests.console.tree import environment_of
from tests.engine.model.tiny import make_scripted_dir


def test_the_command_prints_the_table_and_writes_the_json(tmp_path):
    make_scripted_dir(tmp_path / "models" / "scripted")
    command = ["manage.py", "bench", "--only", "fan-out", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, *command, "--json", str(tmp_path / "out.json")],
        cwd=CHECKOUT,
        env=environment_of(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    content = json.loads((tmp_path / "out.json").read_text())
    encode, decode = content["rows"]
    assert encode["ours"] > 0 and decode["ours"] > 0
    assert encode["peers"] == {"sglang": None} and encode["met"] is None
    assert "--make-peers" in content["missing"]["sglang"]
    assert content["machine"]["cores"] and content["versions"]["torch"] and content["commit"]
    assert "fan-out per row, decode" in done.stdout
    assert "not measured: sglang" in done.stdout
