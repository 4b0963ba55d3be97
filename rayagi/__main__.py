"""``python -m rayagi`` is the command line too."""

import sys

from rayagi.cli import main

if __name__ == "__main__":
    sys.exit(main())
