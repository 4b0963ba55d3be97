"""Annotations of a program: operations, phases and iterations. Without a profile they cost one comparison."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, ClassVar, ParamSpec, Self, TypeVar

from rayagi.profiler.layout import Category

if TYPE_CHECKING:  # it imports this module
    from rayagi.profiler.session import RecordingSession

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

session: RecordingSession | None = None
"""The session of this process, if it is profiled. It hears of iterations."""
annotation_recorder: RecordingSession | None = None
"""Records annotations: the session, except while the costs of hooks are measured one by one."""
activity_recorder: RecordingSession | None = None
"""Records activities; likewise."""


class _Scope:
    """Context manager and decorator. One object may be entered any number of times, nested too, by any thread."""

    category: ClassVar[Category]
    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"the name of {type(self).__name__} is text, not {name!r}")
        self.name = name

    def __enter__(self) -> Self:
        if annotation_recorder is not None:
            annotation_recorder.begin(self.category, self.name)
        return self

    def __exit__(self, *error: object) -> None:
        if annotation_recorder is not None:
            annotation_recorder.end(self.category, self.name)

    def __call__(self, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        """Run every call of a function in the scope.

        Raises:
            TypeError: a generator or a coroutine: it is suspended with the scope open.
        """
        if (
            inspect.isgeneratorfunction(function)
            or inspect.iscoroutinefunction(function)
            or inspect.isasyncgenfunction(function)
        ):
            raise TypeError(
                f"{type(self).__name__} {self.name!r} cannot decorate {function.__qualname__}, which is suspended and "
                "resumed; use it as a context manager around parts without yield and await"
            )

        @wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            if annotation_recorder is None:
                return function(*args, **kwargs)
            with self:
                return function(*args, **kwargs)

        return call


class operation(_Scope):  # noqa: N801  used like a function
    """A step of the algorithm, such as "simulate". Time counts for the innermost open operation of its thread."""

    category = Category.OPERATION
    __slots__ = ()


class timed_operation(operation):  # noqa: N801
    """An operation whose durations the program reads too, with a profile or without: metrics and profiles then agree.

    An object is entered any number of times, by one thread, and not within itself.

    Attributes:
        durations_s: seconds of each time that it was entered, in order
    """

    __slots__ = ("_start_s", "durations_s")

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.durations_s: list[float] = []

    def __enter__(self) -> Self:
        super().__enter__()
        self._start_s = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        self.durations_s.append(time.monotonic() - self._start_s)
        super().__exit__(*error)

    @property
    def seconds(self) -> float:
        """Sum of the durations, including operations within it."""
        return sum(self.durations_s)


class phase(_Scope):  # noqa: N801
    """A part of the program, such as "evaluation", which holds operations."""

    category = Category.PHASE
    __slots__ = ()


class iteration(_Scope):  # noqa: N801
    """One turn of the training loop. The first thread that opens one drives the profile's schedule."""

    category = Category.ITERATION
    __slots__ = ()

    def __init__(self, name: str = "iteration") -> None:
        super().__init__(name)

    def __enter__(self) -> Self:
        if session is not None:
            session.begin_iteration()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if session is not None:
            session.end_iteration()


class activity:  # noqa: N801
    """Time that a thread spends outside Python in what is not intercepted, or is of another category: a kernel, a wait.

    An object is entered once.
    """

    __slots__ = ("_start", "category", "name")

    def __init__(self, category: Category, name: str) -> None:
        self.category, self.name = category, name
        self._start: int | None = None

    def __enter__(self) -> Self:
        if activity_recorder is not None:
            self._start = time.monotonic_ns()
        return self

    def __exit__(self, *error: object) -> None:
        if activity_recorder is not None and self._start is not None:
            activity_recorder.record(self._start, time.monotonic_ns(), self.category, self.name)

    @property
    def is_recorded(self) -> bool:
        """Whether a profile gets it."""
        return self._start is not None

    def record_part(self, start: int, end: int, category: Category, name: str) -> None:
        """Record a part of it, of which the called program tells the times, in ns of CLOCK_MONOTONIC."""
        if activity_recorder is not None:
            activity_recorder.record(start, end, category, name, depth=1)
