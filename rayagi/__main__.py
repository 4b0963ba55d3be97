"""``python -m rayagi`` is the command line too."""

from rayagi.cli import run_process

if __name__ == "__main__":
    run_process()
