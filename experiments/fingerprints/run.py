"""Fingerprints of training: a digest of the parameters after five iterations, for each algorithm, template and kind of task.

    python -m experiments.fingerprints.run --record      # train every case, write results/PROCESSOR.json
    python -m experiments.fingerprints.run               # train every case, compare with that file
    python -m experiments.fingerprints.run --only e_at   # the cases whose name contains this

A change of structure keeps every digest. A change that means to alter numbers records them anew, in a commit of its own.
Bits depend on the processor and on the versions of torch and MuJoCo: digests of another machine are not compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from collectives.compiler import machine
from experiments.scripts import command_line, origin, write_results
from rayagi.run.checkpoints import CheckpointStore

HERE = Path(__file__).parent
RESULTS = HERE / "results"
_ITERATIONS = 5
_SMALL = ("--num-envs", "8", "--set", "network.hidden=[32,16]", "--seed", "3")


@dataclass(frozen=True, slots=True)
class Case:
    """One short training."""

    name: str
    arguments: tuple[str, ...]
    compiled: bool = True
    dataset: bool = False
    """Learns from the dataset that ``recorded`` makes."""


def cases() -> list[Case]:
    """Every case: on-policy ones with the compiled programs and without a compiler, the others with them."""
    trainings = {
        "ppo_ant": ("Ant-v5", "--gmis", "2"),  # whole rollouts in one call
        "ppo_half_cheetah": ("HalfCheetah-v5", "--gmis", "2"),  # MuJoCo's batch
        "ppo_half_cheetah_one_gmi": ("HalfCheetah-v5", "--gmis", "1"),
        "ppo_replicas": ("HalfCheetah-v5", "--gmis", "2", "--set", "gmi.transport=gloo"),
        "ppo_anymal": ("rayagi/Anymal-v0", "--gmis", "2"),
        "ppo_cartpole": ("CartPole-v1", "--gmis", "2"),  # a categorical head, Gymnasium's own environments
        "ppo_fused_cartpole": ("fused/CartPole-v1", "--gmis", "2"),
        "ppo_ea_t": ("HalfCheetah-v5", "--gmis", "2", "--template", "ea_t"),
        "ppo_e_at": ("HalfCheetah-v5", "--gmis", "2", "--template", "e_at"),
        "ppo_dp_mp": (
            "HalfCheetah-v5",
            "--gmis",
            "3",
            "--template",
            "dp_mp",
            "--set",
            "gmi.threads_per_gmi=1",
        ),
        "trpo_half_cheetah": ("HalfCheetah-v5", "--gmis", "2", "--algorithm", "trpo"),
        "appo_dp_only": ("HalfCheetah-v5", "--gmis", "2", "--algorithm", "appo", "--template", "dp_only"),
        "appo_without_vtrace": (
            "HalfCheetah-v5",
            "--gmis",
            "2",
            "--algorithm",
            "appo",
            "--template",
            "dp_only",
            "--set",
            "appo.vtrace=false",
        ),
        "impala_dp_only": ("HalfCheetah-v5", "--gmis", "2", "--algorithm", "impala", "--template", "dp_only"),
        "impala_decoupled": (
            "HalfCheetah-v5",
            "--gmis",
            "2",
            "--algorithm",
            "impala",
            "--set",
            "impala.on_stale=wait",
            "--set",
            "impala.max_lag=1",
        ),
        "a3c_one_gmi": ("HalfCheetah-v5", "--gmis", "1", "--algorithm", "a3c"),  # several do not repeat a run
        "appo_decoupled": (
            "HalfCheetah-v5",
            "--gmis",
            "2",
            "--algorithm",
            "appo",
            "--set",
            "appo.on_stale=wait",
            "--set",
            "appo.max_lag=1",
        ),
    }
    without = {"ppo_fused_cartpole": ("--set", "env.engine=fused_torch")}  # it has no C without a compiler
    early = ("learning_starts=32", "batch_size=32")  # so that five iterations learn
    off_policy = {
        name: (task, "--gmis", "2", "--algorithm", name, *(f"--set={name}.{setting}" for setting in early))
        for name, task in {
            "sac": "HalfCheetah-v5",
            "td3": "HalfCheetah-v5",
            "dqn": "CartPole-v1",
            "fast_td3": "HalfCheetah-v5",
        }.items()
    }
    offline = {
        name: ("HalfCheetah-v5", "--gmis", "1", "--algorithm", name, "--set", f"{name}.num_updates=20")
        for name in ("bc", "iql", "td3_bc")
    }
    trained = [
        Case(name, arguments)
        if compiled
        else Case(f"{name}_without_compiler", (*arguments, *without.get(name, ())), compiled=False)
        for name, arguments in trainings.items()
        for compiled in (True, False)
    ]
    trained += [Case(f"{name}_dp_only", arguments) for name, arguments in off_policy.items()]
    return trained + [Case(name, arguments, dataset=True) for name, arguments in offline.items()]


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _tensors(value)


def digest(run: Path) -> str:
    """Of every tensor that GMIs share (parameters, moments of Adam, statistics), whatever they are called."""
    shared = CheckpointStore(run / "checkpoints").load("last").state["shared"]
    each = sorted(
        hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + tensor.numpy().tobytes()).hexdigest()
        for tensor in _tensors(shared)
    )
    return hashlib.sha256("".join(each).encode()).hexdigest()[:16]


def _rayagi(case: Case, *arguments: str) -> None:
    """Run a command of the product as the case does.

    Raises:
        RuntimeError: it failed, with what it said.
    """
    environment = dict(os.environ) if case.compiled else {**os.environ, "CC": "no-such-compiler"}
    command = [sys.executable, "-m", "rayagi", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{case.name}: {done.stdout[-500:]}{done.stderr[-1500:]}")


def _record(case: Case, folder: Path) -> Path:
    """A dataset: 2048 steps of a policy after one iteration of PPO."""
    run, data = ("--out", str(folder), "--name", "behaviour"), folder / "data"
    _rayagi(case, "train", "HalfCheetah-v5", "--gmis", "1", *_SMALL, "--iterations", "1", *run)
    serve = ("serve", str(folder / "behaviour"), "--gmis", "1", "--explore", "--seed", "3")
    _rayagi(case, *serve, "--steps", "2048", "--out", str(data))
    return data


def fingerprint(case: Case) -> str:
    """Train the case, on a dataset if it learns from one."""
    with tempfile.TemporaryDirectory(prefix="fingerprint-") as folder:
        given = ("--dataset", str(_record(case, Path(folder)))) if case.dataset else ()
        run = ("--iterations", str(_ITERATIONS), "--out", folder, "--name", "run")
        _rayagi(case, "train", *case.arguments, *given, *_SMALL, *run)
        return digest(Path(folder) / "run")


def _where() -> dict[str, object]:
    """What bits depend on."""
    header = origin()
    return {
        "processor": hashlib.sha256(machine().encode()).hexdigest()[:16],
        **{name: header[name] for name in ("torch", "mujoco", "numpy") if name in header},
    }


def main() -> int:
    """Record or compare."""
    parser = command_line(__doc__)
    parser.add_argument("--record", action="store_true", help="write what is found instead of comparing")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--file", type=Path, help="the record (default: results/PROCESSOR.json)")
    given = parser.parse_args()
    given.file = given.file or RESULTS / f"{_where()['processor']}.json"
    kept: dict[str, Any] = json.loads(given.file.read_text()) if given.file.is_file() else {}
    comparable = kept.get("where") == _where()
    if not given.record and not comparable:
        print(
            "no fingerprints of this processor and these versions: --record them from the code before the change"
        )
        return 2
    found = dict(kept.get("fingerprints", {})) if comparable else {}
    changed = []
    for case in cases():
        if given.only not in case.name:
            continue
        now, before = fingerprint(case), found.get(case.name)
        state = "new" if before is None else "same" if now == before else "CHANGED"
        print(f"{case.name:40} {now} {state}", flush=True)
        if state != "same":
            changed.append(case.name)
        found[case.name] = now
        if given.record:
            record = {"origin": origin(), "where": _where(), "fingerprints": found}
            write_results(given.file, record)
    return 1 if changed and not given.record else 0


if __name__ == "__main__":
    raise SystemExit(main())
