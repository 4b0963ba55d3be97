"""Time limits of a session's calls to its GMIs."""

START_TIMEOUT_S = 120.0
"""For a GMI's process to start, and again for it to enter its slice."""
BUILD_TIMEOUT_S = 1000.0
"""For building its program: simulators on a GPU may compile for minutes the first time."""
ITERATION_TIMEOUT_S = 3600.0
"""For one iteration, one evaluation, one state. Generous: it only ends a run that hangs."""
CLOSE_TIMEOUT_S = 5.0
"""For the GMIs to close by themselves; then they are killed."""
