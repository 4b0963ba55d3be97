"""Records the process that starts, if RAYAGI_PROFILE says so; then runs the ``sitecustomize`` that this one hides."""

import json
import os
import signal
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_HERE = os.path.dirname(os.path.abspath(__file__))


def _record(settings: str) -> None:
    """Whatever happens, the program runs."""
    root = json.loads(settings)["root"]
    sys.path.insert(0, root)
    try:
        if sys.version_info < (3, 11):  # noqa: UP036  the program may have a Python of its own
            major, minor = sys.version_info[:2]
            raise RuntimeError(f"it runs Python {major}.{minor}, and the profiler needs 3.11 or later")
        # Imported here: only now the folder of rayagi is on the path.
        from rayagi.profiler.injection import record_this_process

        record_this_process(settings)
        # The profiler needs rayagi's module of this name no longer; the program may have another one.
        for name in [each for each in sys.modules if each.partition(".")[0] == "collectives"]:
            del sys.modules[name]
    except Exception as error:
        sys.stderr.write(f"rayagi profile: process {os.getpid()} is not recorded: {error}\n")
    finally:
        sys.path.remove(root)


def _run_hidden() -> None:
    sys.path[:] = [each for each in sys.path if os.path.abspath(each) != _HERE]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


def _is_main_interpreter() -> bool:
    """The recorder is the process's: a further interpreter needs none."""
    try:
        signal.set_wakeup_fd(-1)  # allowed only there; -1 is what it is at the start
    except ValueError:
        return False
    return True


# It may run twice in one process: a virtual environment reads it again.
if (
    "RAYAGI_PROFILE" in os.environ
    and "rayagi.profiler.injection" not in sys.modules
    and _is_main_interpreter()
):
    _record(os.environ["RAYAGI_PROFILE"])
_run_hidden()
