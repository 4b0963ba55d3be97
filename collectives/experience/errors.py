"""Errors of experience channels: one class per kind, with the facts as attributes."""

from __future__ import annotations


class ChannelError(RuntimeError):
    """Base class. ``str()`` names the channel, what went wrong, and what to do."""

    def __init__(self, channel: str, detail: str) -> None:
        super().__init__(channel, detail)
        self.channel, self.detail = channel, detail

    def __str__(self) -> str:
        return f"channel {self.channel!r}: {self.detail}"


class SchemaError(ChannelError):
    """Invalid fields, shapes or types, or a schema that differs between producer and consumer."""


class ChannelTimeoutError(ChannelError):
    """No slot became free, or no batch arrived, within the time limit."""

    def __init__(self, channel: str, detail: str, waited_s: float) -> None:
        super().__init__(channel, detail)
        self.args = (channel, detail, waited_s)
        self.waited_s = waited_s

    def __str__(self) -> str:
        return f"{super().__str__()} (waited {self.waited_s:.1f} s)"


class LeaseExpiredError(ChannelError):
    """A consumer held a batch for longer than its lease, and lost it: what it has read of it is void."""


class ChannelClosedError(ChannelError):
    """This producer ring, consumer endpoint or parameter store is closed, or its owner has ended."""


class NoChannelError(ChannelError):
    """This host has no channel of that name, or the channel holds no batch."""
