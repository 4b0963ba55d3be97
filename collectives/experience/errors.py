"""What goes wrong with channels: one class per kind, each with its facts as attributes."""

from __future__ import annotations


class ChannelError(RuntimeError):
    """Of a channel. ``str()`` says which, what was wrong, and what to do."""

    def __init__(self, channel: str, detail: str) -> None:
        super().__init__(channel, detail)
        self.channel, self.detail = channel, detail

    def __str__(self) -> str:
        return f"channel {self.channel!r}: {self.detail}"


class SchemaError(ChannelError):
    """Fields, shapes or types that cannot be, or that differ between two ends."""


class ChannelTimeoutError(ChannelError):
    """Nobody made room, or nothing came, within the time limit."""

    def __init__(self, channel: str, detail: str, waited_s: float) -> None:
        super().__init__(channel, detail)
        self.args = (channel, detail, waited_s)
        self.waited_s = waited_s

    def __str__(self) -> str:
        return f"{super().__str__()} (waited {self.waited_s:.1f} s)"


class ChannelClosedError(ChannelError):
    """This end was closed."""


class NoChannelError(ChannelError):
    """There is no such channel on this host, or nothing in it."""
