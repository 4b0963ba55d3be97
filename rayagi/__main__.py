"""``python -m rayagi`` is the command line too."""

import sys

from rayagi import HiddenPackageError, refuse_hidden_packages

try:
    refuse_hidden_packages()  # before the command line imports them
except HiddenPackageError as error:
    sys.exit(f"rayagi: {error}")

from rayagi.cli import run_process

if __name__ == "__main__":
    run_process()
