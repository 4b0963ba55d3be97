"""Checkpoints, written atomically: temporary folder, checksums, flush, rename. The best and the last two are kept.

    checkpoints/iteration_000123/shared.pt      state that all replicas share: weights, optimizer, normalisers
                                 local.pt       state of each GMI: environments, random numbers
                                 replay/gmi_0/  replay of each GMI that has one (actors.replay.checkpoint)
                                 counters.json  progress of the run
                                 manifest.json  size and SHA-256 of each file; which GMIs have a replay
    checkpoints/best.json, last.json            name of the folder

A folder whose name starts with a dot is unfinished, and is removed when the run is next opened.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from collectives.files import sync_path
from rayagi.run.atomic import replace_json, write_bytes
from rayagi.run.errors import CheckpointError, DiskError, NoCheckpointError, disk_errors

NUM_LAST = 2
"""Newest checkpoints that are kept besides the best. Two, in case the last one is damaged."""
_NAME = re.compile(r"iteration_(\d{6,})")
SaveReplays = Callable[[Path], Mapping[int, str]]
"""Writes the replays of GMIs into a folder; returns by GMI why it failed, or ''."""


def replay_name(gmi: int) -> str:
    """Folder of a GMI's replay."""
    return f"gmi_{gmi}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A loaded checkpoint."""

    name: str
    state: dict[str, Any]
    """``{"shared", "local", "num_gmis", "replays": folder by GMI}``; without ``local`` and ``replays`` if only the policy
    was requested."""
    counters: dict[str, Any]
    damaged: tuple[str, ...] = ()
    """Newer checkpoints that were skipped as damaged, with the reason."""


class CheckpointStore:
    """The checkpoints of one run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_in_use = False
        """Whether a run has begun with it: a folder that is missing then was removed or renamed, and is not made anew."""

    def names(self) -> list[str]:
        """Finished checkpoints, oldest first."""
        if not self._folder.is_dir():
            return []
        found = [entry.name for entry in self._folder.iterdir() if _NAME.fullmatch(entry.name)]
        return sorted(found, key=_iteration)

    def pointer(self, which: str) -> dict[str, Any] | None:
        """Content of ``best.json`` or ``last.json``; None if it is missing or unreadable."""
        try:
            read = json.loads((self._folder / f"{which}.json").read_text())
        except (OSError, ValueError, RecursionError):
            return None
        return read if isinstance(read, dict) and isinstance(read.get("checkpoint"), str) else None

    def _best_is_damaged(self) -> bool:
        return self.pointer("best") is None and (self._folder / "best.json").exists()

    def save(
        self,
        state: Mapping[str, Any],
        counters: Mapping[str, Any],
        *,
        best: Mapping[str, Any] | None = None,
        save_replays: SaveReplays | None = None,
    ) -> str:
        """Write a checkpoint and make it the last one; with ``best``, also the best one.

        Args:
            state: of the session, ``{"shared", "local", "num_gmis"}``.
            counters: progress of the run; ``iteration`` names the folder.
            best: metric and value that make this the best checkpoint so far; None: it is not.
            save_replays: of the session; None: there are none.

        Returns:
            Name of the checkpoint.

        Raises:
            DiskError: the disk is full or read-only; earlier checkpoints and both pointers stay.
        """
        name = f"iteration_{counters['iteration']:06d}"
        if name not in self.names():
            self._write_folder(name, state, counters, save_replays)
        if best is not None:
            replace_json(self._folder / "best.json", {"checkpoint": name, **best})
        replace_json(self._folder / "last.json", {"checkpoint": name})
        self._prune()
        return name

    def load(self, which: str = "last", *, with_local: bool = True) -> Checkpoint:
        """Load a checkpoint after checking it against its manifest.

        Args:
            which: ``best``, ``last``, or a checkpoint's name. ``last`` falls back to the newest intact
                one, ``best`` to the last.
            with_local: load the GMIs' local state too.

        Raises:
            NoCheckpointError: there is no intact one.
        """
        damaged: list[str] = []
        if which == "best" and self._best_is_damaged():
            damaged.append(f"{self._folder}/best.json is damaged, so the best checkpoint is not known")
        for name in self._candidates(which):
            try:
                return self._read(name, with_local=with_local, damaged=tuple(damaged))
            except CheckpointError as error:
                damaged.append(str(error))
        usable = tuple(name for name in self.names() if not any(f"/{name} is" in text for text in damaged))
        raise NoCheckpointError(str(self._folder.parent), which, usable, tuple(damaged))

    def rewind(self, iteration: int) -> None:
        """Begin or go back to an iteration: remove unfinished folders, and move later checkpoints aside."""
        self._is_in_use = True
        with disk_errors(self._folder):
            self._folder.mkdir(
                exist_ok=True
            )  # somebody may have removed it, or copied a run without empty folders
            for entry in self._folder.glob(".iteration_*"):
                shutil.rmtree(entry)
            for name in self.names():
                if _iteration(name) > iteration:
                    aside = self._folder / f"damaged_{name}"
                    shutil.rmtree(aside, ignore_errors=True)
                    (self._folder / name).rename(aside)
            best = self.pointer("best")
            if best is not None and best["checkpoint"] not in self.names():
                (self._folder / "best.json").unlink()

    def _candidates(self, which: str) -> list[str]:
        newest_first = self.names()[::-1]
        if which == "last":
            return newest_first
        if which == "best":
            best = self.pointer("best")
            first = [best["checkpoint"]] if best and best["checkpoint"] in newest_first else []
            return first + [name for name in newest_first if name not in first]
        return [which] if which in newest_first else []

    def _write_folder(
        self,
        name: str,
        state: Mapping[str, Any],
        counters: Mapping[str, Any],
        save_replays: SaveReplays | None,
    ) -> None:
        unfinished = self._folder / f".{name}.{os.getpid()}"
        contents = {
            "shared.pt": _serialised({"shared": state["shared"], "num_gmis": state["num_gmis"]}),
            "local.pt": _serialised({"local": state["local"]}),
            "counters.json": json.dumps(dict(counters), indent=2).encode(),
        }
        manifest = {file: {"bytes": len(data), "sha256": _digest(data)} for file, data in contents.items()}
        try:
            with disk_errors(unfinished):
                unfinished.mkdir(parents=not self._is_in_use, exist_ok=True)
            for file, data in contents.items():
                write_bytes(unfinished / file, data)
            replays = [] if save_replays is None else _write_replays(unfinished / "replay", save_replays)
            content = {"files": manifest, "replays": replays}
            write_bytes(unfinished / "manifest.json", json.dumps(content, indent=2).encode())
            with disk_errors(unfinished):
                sync_path(unfinished)
                unfinished.rename(self._folder / name)
                sync_path(self._folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _read(self, name: str, *, with_local: bool, damaged: tuple[str, ...]) -> Checkpoint:
        folder = self._folder / name
        files, replays = _manifest(folder)
        wanted = ["counters.json", "shared.pt", *(["local.pt"] if with_local else [])]
        contents = {file: _checked_content(folder, file, files) for file in wanted}
        state = load_tensors(contents["shared.pt"], folder / "shared.pt")
        if with_local:
            state |= load_tensors(contents["local.pt"], folder / "local.pt")
            state["replays"] = {gmi: str(_existing_replay(folder, gmi).absolute()) for gmi in replays}
        return Checkpoint(
            name=name, state=state, counters=json.loads(contents["counters.json"]), damaged=damaged
        )

    def _prune(self) -> None:
        if self._best_is_damaged():
            return  # any of them may be the best
        best = self.pointer("best")
        kept = {*self.names()[-NUM_LAST:], *([best["checkpoint"]] if best else [])}
        for name in self.names():
            if name not in kept:
                shutil.rmtree(self._folder / name, ignore_errors=True)


def _iteration(name: str) -> int:
    return int(name.removeprefix("iteration_"))


def _serialised(value: Any) -> bytes:
    # Imported here: opening a run folder does not need torch.
    import torch

    # Write through memory: torch's file writer reports a full disk as a RuntimeError without errno.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write_replays(folder: Path, save_replays: SaveReplays) -> list[int]:
    """Write replays. Returns the GMIs that have one.

    Raises:
        DiskError: one cannot be written, or not where this process sees it.
    """
    with disk_errors(folder):
        folder.mkdir()
    found = save_replays(folder)
    for gmi, reason in found.items():
        if reason:
            raise DiskError(str(folder), reason)
        if not (folder / replay_name(gmi)).is_dir():
            missing = f"the replay of GMI {gmi} is not there, since its host has another disk"
            raise DiskError(str(folder), missing, "choose a folder that all hosts share with --out")
    if not found:
        folder.rmdir()
    else:
        sync_path(folder)
    return list(found)


def _existing_replay(folder: Path, gmi: int) -> Path:
    found = folder / "replay" / replay_name(gmi)
    if not (found / "manifest").is_file():
        raise CheckpointError(str(folder), f"replay/{found.name} is missing")
    return found


def _manifest(folder: Path) -> tuple[dict[str, dict[str, Any]], list[int]]:
    """Files, and the GMIs that have a replay."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        return dict(manifest["files"]), [int(gmi) for gmi in manifest.get("replays", [])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(str(folder), "manifest.json is missing or unreadable") from error


def _checked_content(folder: Path, file: str, files: Mapping[str, Mapping[str, Any]]) -> bytes:
    try:
        data = (folder / file).read_bytes()
    except OSError as error:
        raise CheckpointError(str(folder), f"{file} cannot be read ({error.strerror})") from error
    expected = files.get(file)
    if expected is None:
        raise CheckpointError(str(folder), f"{file} is not in its manifest")
    if len(data) != expected["bytes"]:
        raise CheckpointError(
            str(folder), f"{file} has {len(data)} bytes where {expected['bytes']} were written"
        )
    if _digest(data) != expected["sha256"]:
        raise CheckpointError(str(folder), f"{file} does not match its checksum")
    return data


def _allowed() -> list[Any]:
    """Types allowed besides tensors and Python's built-in values: numpy arrays and scalars."""
    array = np.zeros(1)
    reconstruct = array.__reduce__()[0]
    scalar = np.float64(0.0).__reduce__()[0]
    dtypes = {type(np.dtype(code)) for code in "?bhilqBHILQefdU"}
    # Pickle writes an empty array as a call of bytes.
    return [reconstruct, scalar, np.ndarray, np.dtype, bytes, *dtypes]


def load_tensors(data: bytes, path: Path) -> dict[str, Any]:
    """Load the output of ``torch.save`` to the CPU, without executing code from it: a run folder may be untrusted.

    Raises:
        CheckpointError: the data holds types other than tensors, numpy arrays and Python's built-in values.
    """
    # Imported here: opening a run folder does not need torch.
    import torch

    try:
        with torch.serialization.safe_globals(_allowed()):
            return dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
    except Exception as error:  # hostile bytes raise any: KeyError, IndexError, TypeError, struct.error
        raise CheckpointError(str(path.parent), f"{path.name} cannot be read ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    """The sentence of torch's message that states the cause."""
    lines = str(error).splitlines() or [type(error).__name__]
    telling = [line for line in lines if "Unpickler error: " in line or "unsupported GLOBAL" in line]
    return (telling or lines)[0].rpartition("error: ")[2].partition(". ")[0].strip().rstrip(".")
