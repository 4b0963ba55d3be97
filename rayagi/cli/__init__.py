"""The command line. Light on import: each command loads what it needs when it runs."""

from rayagi.cli.main import main

__all__ = ["main"]
