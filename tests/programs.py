"""Runs Python programs in processes of their own."""

import subprocess
import sys
import textwrap


def run_python(code, *arguments, check=True, timeout=120, **options):
    """The ended process, with its output as text. The code may be indented."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=check, **options)
