"""Configuration errors: setting, value, reason and suggestion."""

from __future__ import annotations

from enum import Enum


class NoValue(Enum):
    """Marks a ConfigError that is not about one value, such as a missing file."""

    NO_VALUE = "no value"

    def __repr__(self) -> str:
        return "<no value>"


NO_VALUE = NoValue.NO_VALUE


class ConfigError(ValueError):
    """A setting that cannot be used.

    Attributes:
        path: the setting as the user would write it (``ppo.learning_rate``), or a file's path
        value: the given value; NO_VALUE if the error is not about a value
        reason: what is wrong, and the limit
        suggestion: what to write instead; may be empty
    """

    def __init__(self, path: str, value: object, reason: str, suggestion: str = "") -> None:
        super().__init__(path, value, reason, suggestion)
        self.path, self.value, self.reason, self.suggestion = path, value, reason, suggestion

    def __str__(self) -> str:
        where = self.path if self.value is NO_VALUE else f"{self.path} = {self.value!r}"
        return f"{where}: {self.reason}; {self.suggestion}" if self.suggestion else f"{where}: {self.reason}"

    def at(self, path: str) -> ConfigError:
        """The same error under another name of the setting."""
        return ConfigError(path, self.value, self.reason, self.suggestion)
