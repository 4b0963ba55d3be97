"""A profile while it is recorded: the state of this process."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cache, wraps
from pathlib import Path
from typing import Any, NoReturn

from collectives.files import replacing
from rayagi.profiler import scopes
from rayagi.profiler.core_times import NAMES, core_times
from rayagi.profiler.errors import ProfilerError
from rayagi.profiler.fallback import PythonRecorder
from rayagi.profiler.gpu import GpuRecorder
from rayagi.profiler.interception import Interception, packages_with
from rayagi.profiler.layout import ACTIVITY, ANNOTATION, CALL, HOOKS, PROFILE, VERSION, Category
from rayagi.profiler.machine import this_machine
from rayagi.profiler.native import OFF, RECORD, EventRecorder, load_native
from rayagi.profiler.process_folder import ProcessFolder
from rayagi.profiler.program import script_of
from rayagi.profiler.schedule import Schedule, Turns

DEFAULT_LIMIT_MB = 1024
MOST_LIMIT_MB = 1_000_000_000
_ITERATION = Category.ITERATION


class _Process:
    """State of this process: its session, and a lock that is held while one begins or ends."""

    change = threading.RLock()
    session: RecordingSession | None = None

    def set_session(self, session: RecordingSession | None, hooks: frozenset[str] = HOOKS) -> None:
        """From now on these kinds of hook record into the session."""
        self.session = scopes.session = session
        scopes.annotation_recorder = session if ANNOTATION in hooks else None
        scopes.activity_recorder = session if ACTIVITY in hooks else None


_process = _Process()


class RecordingSession:
    """Records this process into a profile. Forked children go on with a session of their own."""

    def __init__(
        self,
        profile: Path,
        name: str | None,
        metadata: dict[str, Any],
        *,
        packages: Mapping[str, Category],
        schedule: Schedule | None,
        limit_bytes: int,
        hooks: frozenset[str] = HOOKS,
        turns: Turns | None = None,
        gpu: bool = False,
    ) -> None:
        self.profile = profile
        self._schedule, self._limit_bytes = schedule, limit_bytes
        self._recorder: EventRecorder = load_recorder()
        self._begin, self._end, self._record = self._recorder.begin, self._recorder.end, self._recorder.record
        self._turns = turns
        self._lock = threading.RLock()
        self._mode = OFF
        self._num_iterations = self._open_iterations = 0
        self._driver: int | None = None  # thread whose iterations count
        self._has_default_name = name is None
        self._cores, self._cores_before = dict.fromkeys(NAMES, 0), core_times()
        self._gpu = GpuRecorder(self.intern_all, limit_bytes) if gpu else None
        self._interception = Interception(
            self._recorder,
            self.intern_all,
            packages,
            keeps=_call_hook(self._recorder) in hooks,
            torch_is_imported=None if self._gpu is None else self._gpu.torch_is_imported,
        )
        self._open_folder(ProcessFolder(profile, name or _default_name(), metadata))
        self._interception.install()

    def _open_folder(self, folder: ProcessFolder) -> None:
        self._folder, self._ids = folder, folder.ids
        self._recorder.setup(str(self._folder.path), self._limit_bytes)
        if self._schedule is None:
            self._switch(RECORD)

    def begin(self, category: Category, name: str) -> None:
        """Open a scope of the calling thread."""
        flags = (self._num_iterations - 1) % (1 << 16) if category is _ITERATION else 0
        try:  # here and below not intern() at once: a call more costs a tenth of the event
            found = self._ids[name]
        except KeyError:
            found = self.intern(name)
        self._begin(category, found, flags)

    def end(self, category: Category, name: str) -> None:
        """Close it.

        Raises:
            ProfilerError: it is not the innermost open scope of the calling thread.
        """
        try:
            found = self._ids[name]
        except KeyError:
            found = self.intern(name)
        innermost = self._end(category, found)
        # In turns it may have been opened while nothing was recorded.
        if innermost is not None and self._turns is None:
            raise ProfilerError(
                f"{category.name.lower()} {name!r} is closed while {self._folder.texts[innermost]!r} is the innermost one "
                "open in this thread; close them in the reverse order, in the thread that opened them"
            )

    def record(self, start: int, end: int, category: Category, name: str, depth: int = 0) -> None:
        """Record what the calling thread did; times in ns of CLOCK_MONOTONIC. Depth 1: a part of another."""
        try:
            found = self._ids[name]
        except KeyError:
            found = self.intern(name)
        self._record(start, end, category, found, depth)

    def begin_iteration(self) -> None:
        """Switch recording on or off by the schedule. Iterations in iterations, and of other threads, do not count."""
        with self._lock:
            if self._driver is None:
                self._driver = threading.get_ident()
            if self._driver != threading.get_ident():
                return
            self._open_iterations += 1
            if self._open_iterations > 1:
                return
            if self._schedule is not None:
                self._switch(self._schedule.mode(self._num_iterations))
            if self._turns is not None:
                self._set_hooks(self._turns.hooks(self._num_iterations))
                self._turns.begin()
            self._num_iterations += 1

    def end_iteration(self) -> None:
        """What follows the last iteration of a cycle is not recorded."""
        with self._lock:
            if self._driver != threading.get_ident() or not self._open_iterations:
                return
            self._open_iterations -= 1
            if not self._open_iterations and self._turns is not None:
                self._turns.end(self._num_iterations - 1, self._folder.path)
                self._set_hooks(HOOKS)  # so that scopes around iterations are opened and closed
            if self._open_iterations or self._schedule is None:
                return
            if self._schedule.mode(self._num_iterations) == OFF:
                self._switch(OFF)

    def _set_hooks(self, hooks: frozenset[str]) -> None:
        if _process.session is self:
            self._interception.switch(_call_hook(self._recorder) in hooks)
            _process.set_session(self, hooks)

    def _switch(self, mode: int) -> None:
        if mode == self._mode:
            return
        if self._mode == RECORD:
            passed = core_times().since(self._cores_before)
            self._cores = {name: self._cores[name] + passed[name] for name in NAMES}
        if self._mode != OFF:
            self._recorder.stop()
            if self._gpu is not None:
                self._gpu.stop(self._folder.path)
        if self._mode == RECORD:
            self._describe()  # now, since the process may be killed later, as Ray does with its workers
        self._mode = mode
        if mode == RECORD and self._gpu is not None:
            self._gpu.start()
        self._cores_before = core_times()
        if mode != OFF:
            self._recorder.start(mode, self.intern(self._folder.name))

    def intern(self, text: str) -> int:
        """The id of a name."""
        while (found := self._folder.name_id(text)) is None:
            with self._lock:
                self._folder.add_names([text])
        return found

    def intern_all(self, texts: list[str]) -> list[int]:
        """The ids of many names, with one write."""
        with self._lock:
            self._folder.add_names(texts)
        return [self.intern(text) for text in texts]

    def set_name(self, name: str) -> None:
        """Name the process."""
        with self._lock:
            self._folder.name, self._has_default_name = name, False
            self._folder.describe()

    def add_metadata(self, values: dict[str, Any]) -> None:
        """Add entries to the process's metadata."""
        with self._lock:
            self._folder.metadata = {**self._folder.metadata, **_plain(values)}
            self._folder.describe()

    def finish(self) -> None:
        """End recording and write how it ended."""
        with self._lock:
            self._switch(OFF)
            self._interception.remove()
            if self._has_default_name:  # multiprocessing names a process after it has started
                self._folder.name = _process_name() or self._folder.name
            self._describe(
                lost=self._recorder.lost() + (0 if self._gpu is None else self._gpu.lost),
                intercepted=self._interception.counts,
                end_monotonic_ns=time.monotonic_ns(),
            )

    @contextmanager
    def ended(self) -> Iterator[None]:
        """End recording, and go on with it if the block is left: then the program has not been replaced."""
        with self._lock:
            mode = self._mode
            self._switch(OFF)
            self._describe(lost=self._recorder.lost(), end_monotonic_ns=time.monotonic_ns(), is_replaced=True)
        try:
            yield
        finally:
            with self._lock:
                self._switch(mode)
                self._describe()

    def _describe(self, **more: Any) -> None:
        """Write what is known of the process by now, and of what it recorded."""
        utilization = {} if self._gpu is None else self._gpu.nvml_utilization()
        self._folder.describe(
            cores=self._cores, nvml_utilization=utilization, iterations=self._num_iterations, **more
        )

    def after_fork(self) -> None:
        """In the child: a folder of its own, no open scopes, iterations counted from 0."""
        self._lock = threading.RLock()  # another thread of the parent may have held it
        if self._gpu is not None:
            self._gpu.forget()
        self._mode, self._driver = OFF, None
        self._num_iterations = self._open_iterations = 0
        self._cores = dict.fromkeys(NAMES, 0)
        parent = self._folder
        self._has_default_name = True
        try:
            folder = ProcessFolder(self.profile, f"{parent.name} (forked)", parent.metadata, parent.texts)
        except OSError:  # a full disk: the child runs without a profile
            _process.set_session(None)
            self._interception.remove()
        else:
            self._open_folder(folder)


@contextmanager
def profile(
    folder: Path | str,
    *,
    name: str | None = None,
    metadata: dict[str, Any] | None = None,
    schedule: Schedule | None = None,
    limit_mb: int = DEFAULT_LIMIT_MB,
    simulators: Sequence[str] = (),
    natives: Sequence[str] = (),
    intercept: bool = True,
    gpu: bool = False,
) -> Iterator[RecordingSession]:
    """Record this process, and the children that it forks, into a new folder.

    Args:
        folder: new or empty
        name: of this process; default the program's name
        metadata: anything of JSON that should be kept with the process
        schedule: which iterations; default everything
        limit_mb: disk space for each process's events; what does not fit is dropped and counted
        simulators: top-level modules whose native functions count as a simulator's, besides MuJoCo's and EnvPool's
        natives: top-level modules whose native functions count as other native code, such as numpy
        intercept: whether calls of native functions are recorded, or annotations only
        gpu: whether calls of CUDA, kernels and copies are, through torch.profiler (``gpu.GpuRecorder``)

    Raises:
        ProfilerError: this process is being profiled already; the folder is not empty or cannot be made; a limit that is not
            of 1 to ``MOST_LIMIT_MB``; metadata that is not of JSON; a module that does not exist.
    """
    packages = packages_with(simulators, natives) if intercept else {}
    _check_start(limit_mb, metadata)
    path = create_profile(Path(folder), list(getattr(sys, "orig_argv", sys.argv)), packages, schedule)
    session = start(path, packages, name, metadata, schedule, limit_mb, gpu=gpu)
    try:
        yield session
    finally:
        stop(session)


def create_profile(
    path: Path, command: list[str], packages: Mapping[str, Category], schedule: Schedule | None = None
) -> Path:
    """Make the folder of a new profile.

    Raises:
        ProfilerError: it is not empty, or cannot be made.
    """
    path = path.absolute()
    about = {
        "version": VERSION,
        "command": command,
        "script": script_of(command),
        "start_unix_ns": time.time_ns(),
        "intercepted": {name: category.name.lower() for name, category in packages.items()},
        "machine": this_machine(),
        "schedule": None if schedule is None else asdict(schedule),
    }
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise ProfilerError(f"{path} is not empty; a profile needs a folder of its own")
        (path / PROFILE).write_text(json.dumps(about), encoding="utf-8")
    except OSError as error:
        raise ProfilerError(f"{path} cannot hold a profile: {error.strerror}") from error
    return path


def note_iterations(path: Path, count: int) -> None:
    """Write into a profile how many iterations the program made, where its processes could not: Ray kills its workers.

    A full disk is no error: the profile is complete without it.
    """
    with suppress(OSError):
        about = json.loads((path / PROFILE).read_bytes())
        with replacing(path / PROFILE) as beside:
            beside.write_text(json.dumps({**about, "iterations": count}), encoding="utf-8")


def start(
    path: Path,
    packages: Mapping[str, Category],
    name: str | None = None,
    metadata: dict[str, Any] | None = None,
    schedule: Schedule | None = None,
    limit_mb: int = DEFAULT_LIMIT_MB,
    hooks: frozenset[str] = HOOKS,
    turns: Turns | None = None,
    gpu: bool = False,
) -> RecordingSession:
    """Begin to record this process into an existing profile; ``profile`` names the arguments and errors.

    To measure what hooks cost: some kinds of them only, or others in each iteration.
    """
    with _process.change:
        _check_start(limit_mb, metadata)
        try:
            session = RecordingSession(
                path,
                name,
                _plain(metadata or {}),
                packages=packages,
                schedule=schedule,
                limit_bytes=limit_mb * 1_000_000,
                hooks=hooks,
                turns=turns,
                gpu=gpu,
            )
        except OSError as error:
            raise ProfilerError(f"{path} cannot hold a profile: {error.strerror}") from error
        _process.set_session(session, hooks)
        _register_once()
        os._exit, os.execv, os.execve = _finish_and_exit, _recording_ends(_execv), _recording_ends(_execve)
    return session


def _check_start(limit_mb: int, metadata: dict[str, Any] | None) -> None:
    """Before anything is written; ``profile`` names the errors."""
    if not 1 <= limit_mb <= MOST_LIMIT_MB:
        raise ProfilerError(f"limit_mb is 1 to {MOST_LIMIT_MB:,}, not {limit_mb}")
    if _process.session is not None:
        raise ProfilerError(f"this process is being recorded already, into {_process.session.profile}")
    _plain(metadata or {})


def stop(session: RecordingSession) -> None:
    """End it; in a forked child this ends the child's."""
    with _process.change:
        if _process.session is session:
            _process.set_session(None)
            session.finish()
            os._exit, os.execv, os.execve = _exit, _execv, _execve


_exit, _execv, _execve = os._exit, os.execv, os.execve


def _finish_and_exit(status: int) -> NoReturn:
    """In place of os._exit, which runs no exit handlers; children that multiprocessing forks end with it."""
    if (session := current()) is not None:
        stop(session)
    _exit(status)


def _recording_ends(replace_program: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    """In place of os.execv and os.execve, which the other functions of their kind call: recording ends before it."""

    @wraps(replace_program)
    def finish_and_replace(path: Any, *arguments: Any, **named: Any) -> NoReturn:
        session = current()
        # A path that cannot be executed, as of a search through PATH, must not interrupt the recording.
        if session is None or not (isinstance(path, int) or os.access(path, os.X_OK)):
            replace_program(path, *arguments, **named)
        with session.ended():
            replace_program(path, *arguments, **named)

    return finish_and_replace


def current() -> RecordingSession | None:
    """The session of this process."""
    return _process.session


def name_process(name: str) -> None:
    """Name this process in the profile, such as "trainer". Without a profile it does nothing."""
    if (session := current()) is not None:
        session.set_name(name)


def add_metadata(**values: Any) -> None:
    """Keep values of JSON with this process, such as a seed. Without a profile it does nothing.

    Raises:
        ProfilerError: a value is not of JSON.
    """
    if (session := current()) is not None:
        session.add_metadata(values)


def _plain(metadata: dict[str, Any]) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = json.loads(json.dumps(metadata))
    except (TypeError, ValueError, RecursionError) as error:
        raise ProfilerError(f"a profile's metadata is written as JSON: {error}") from error
    return plain


def _process_name() -> str | None:
    """Of a process that multiprocessing started."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is None or multiprocessing.parent_process() is None:
        return None
    return str(multiprocessing.current_process().name)


def _default_name() -> str:
    """Of the program: its script, or its module, which is not in sys.argv before it is found."""
    program = sys.argv[0] if sys.argv else ""
    if program == "-m" and "-m" in sys.orig_argv[:-1]:
        return sys.orig_argv[sys.orig_argv.index("-m") + 1]
    return os.path.basename(program) or "python"


def _call_hook(recorder: EventRecorder) -> str:
    """What wrappers in Python record is from Python, as activities are."""
    return CALL if hasattr(recorder, "swap") else ACTIVITY


@cache
def load_recorder() -> EventRecorder:
    """One for the process: C's state is the process's."""
    native = load_native()
    return PythonRecorder() if native is None else native


@cache
def _register_once() -> None:
    """After the recorder has registered what it does in forked children."""
    os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    _process.change = threading.RLock()
    if (session := current()) is not None:
        session.after_fork()
