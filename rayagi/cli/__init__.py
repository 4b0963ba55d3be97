"""The ``rayagi`` command line. Light on import: each command imports what it needs when it runs."""

from rayagi.cli.main import main, run_process

__all__ = ["main", "run_process"]
