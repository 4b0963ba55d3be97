"""Stand-in of Isaac Gym Preview 4: like it, it refuses to be imported after torch."""

import sys

if "torch" in sys.modules:
    raise ImportError(
        "PyTorch was imported before isaacgym modules.  Please import torch after isaacgym modules."
    )
