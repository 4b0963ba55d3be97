"""Waits for what other threads and processes bring about."""

import time


def until(condition, limit_s=60.0):
    """What the condition is once it is true."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"the condition did not come true within {limit_s:g} s"
        time.sleep(0.02)
    return found
