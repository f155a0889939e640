"""``python -m console.guarded TITLE COMMAND ARGS...``: a foreign program that dies with its parent.

The parent-death signal survives ``exec``, so valkey and Celery need not know of it.
"""

from __future__ import annotations

import os
import sys

from engine.process_guard import die_with_parent

if __name__ == "__main__":
    title, *command = sys.argv[1:]
    die_with_parent(title)
    os.execv(command[0], command)
