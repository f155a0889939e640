#!/usr/bin/env python3
"""The console's commands: ``serve``, ``web``, ``model``, ``apikey``, ``doctor``, Django's own."""

from __future__ import annotations

import os
import sys

from django.core.exceptions import ImproperlyConfigured
from django.core.management import execute_from_command_line


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")
    try:
        execute_from_command_line(sys.argv)
    except ImproperlyConfigured as error:
        raise SystemExit(f"Configuration: {error}") from None


if __name__ == "__main__":
    main()
