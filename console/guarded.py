"""``python -m console.guarded [--memory BYTES] TITLE COMMAND ARGS...``: bounded in life and memory.

The program dies with its parent.

The parent-death signal and the limit survive ``exec``, so the program need not know of them.
"""

from __future__ import annotations

import argparse
import os
import resource

from engine.process_guard import die_with_parent

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", type=int, default=0, help="bytes of address space")
    parser.add_argument("title")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    die_with_parent(options.title)
    if options.memory:
        resource.setrlimit(resource.RLIMIT_AS, (options.memory, options.memory))
    os.execv(options.command[0], options.command)
