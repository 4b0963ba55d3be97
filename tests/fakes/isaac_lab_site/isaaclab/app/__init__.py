"""Starts the application, without which the rest cannot be imported."""

RUNNING = []


class AppLauncher:
    """Has the application as ``app``."""

    def __init__(self, launcher_args=None, **kwargs):
        assert kwargs == {"headless": True, "device": "cuda:0"}
        print("[INFO][AppLauncher]: Using device: cuda:0")
        RUNNING.append(self)
        self.app = object()
