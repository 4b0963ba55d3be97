"""A policy as a file that other programs run without rayagi: an ONNX model, or a program of torch.export."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rayagi.run.atomic import replace_bytes
from rayagi.serving.errors import ExportError
from rayagi.serving.policy_server.served_policy import GreedyPolicy, policy_info
from rayagi.serving.source import SavedPolicy

INPUTS, OUTPUTS = ("obs", "state"), ("actions", "next_state")
"""Names in the file; the second ones only of a recurrent policy."""
METADATA = "rayagi"
"""Name of the description: JSON, as of the policy server's /info."""
_ROWS = (1, 7)
"""Observations that a file is compared with; it is made with the last number, which is rarely a number of choices too."""
_TOLERANCE = 1e-4
"""Largest difference between the file's numbers and the policy's, absolute and relative."""

Run = Callable[[Sequence[Tensor]], Sequence[NDArray[Any]]]
"""Computes the outputs of inputs."""


class _Program(nn.Module):
    """Raw observations to the environment's actions, with the policy's own operations."""

    def __init__(self, policy: GreedyPolicy) -> None:
        super().__init__()
        self._policy, self.model = policy, policy.saved.policy.model

    def forward(self, obs: Tensor, state: Tensor | None = None) -> Any:
        """(rows, obs_dim) -> actions; a recurrent policy's with (rows, state_dim) -> actions and the next states."""
        actions, following = self._policy.actions(obs, state)
        return actions if following is None else (actions, following)


def export_policy(saved: SavedPolicy, path: Path) -> None:
    """Write the most likely actions of a policy, of any number of raw observations, and compare the file's with its own.

    Args:
        saved: the policy
        path: .onnx or .pt2; replaced if it exists

    Raises:
        ExportError: another ending, a package is missing, or the networks cannot be written so that they do the same.
        DiskError: the file cannot be written.
    """
    formats = {".onnx": _onnx, ".pt2": _torch_program}
    if path.suffix not in formats:
        raise ExportError(str(path), f"its ending says the format: use {' or '.join(formats)}")
    program, inputs = _Program(GreedyPolicy(saved)).eval(), _inputs(saved, rows=_ROWS[-1])
    any_rows = tuple({0: torch.export.Dim.DYNAMIC} for _ in inputs)
    try:
        with _quiet(), torch.no_grad():
            exported = torch.export.export(program, inputs, dynamic_shapes=any_rows)
            content, run = formats[path.suffix](exported, len(inputs), json.dumps(policy_info(saved)))
    except ImportError as error:
        raise ExportError(
            str(path), f"needs {error.name}: pip install 'rayagi[onnx]', or write .pt2"
        ) from error
    except Exception as error:  # of any of torch's passes, or of a user's module
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ExportError(
            str(path),
            f"torch cannot turn the policy's networks into a program: {reason}; what they do must not depend on the numbers "
            "in an observation (`if`), and the number of rows is obs.shape[0], not len(obs)",
        ) from error
    for rows in _ROWS:
        with _quiet():
            _compare(program, run, _inputs(saved, rows=rows), path)
    replace_bytes(path, content)


def _inputs(saved: SavedPolicy, *, rows: int) -> tuple[Tensor, ...]:
    """Observations as the policy has seen them, and states."""
    normaliser, generator = saved.policy.normaliser, torch.Generator().manual_seed(rows)
    obs = torch.randn((rows, saved.info.obs_dim), generator=generator)
    if normaliser is not None:
        obs = normaliser.shift + obs / normaliser.scale
    dim = saved.policy.state_dim
    return (obs, torch.rand((rows, dim), generator=generator)) if dim else (obs,)


def _torch_program(exported: torch.export.ExportedProgram, _num_inputs: int, info: str) -> tuple[bytes, Run]:
    file = io.BytesIO()
    torch.export.save(exported, file, extra_files={f"{METADATA}.json": info})
    file.seek(0)
    loaded = torch.export.load(file).module()
    return file.getvalue(), lambda given: [output.numpy() for output in _listed(loaded(*given))]


def _onnx(exported: torch.export.ExportedProgram, num_inputs: int, info: str) -> tuple[bytes, Run]:
    # Packages of an extra.
    import onnx
    import onnxscript  # noqa: F401  # torch imports it
    from onnx.reference import ReferenceEvaluator

    names = list(INPUTS[:num_inputs])
    made = torch.onnx.export(
        exported, input_names=names, output_names=list(OUTPUTS[:num_inputs]), dynamo=True, verbose=False
    )
    assert made is not None
    made.model.metadata_props[METADATA] = info
    content = made.model_proto.SerializeToString()
    evaluator = ReferenceEvaluator(onnx.load_model_from_string(content))

    def run(given: Sequence[Tensor]) -> list[NDArray[Any]]:
        arrays = [value.numpy() for value in given]
        return list(evaluator.run(None, dict(zip(names, arrays, strict=True))))

    return content, run


def _listed(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


@torch.inference_mode()
def _compare(program: _Program, run: Run, inputs: tuple[Tensor, ...], path: Path) -> None:
    for name, found, own in zip(OUTPUTS, run(inputs), _listed(program(*inputs)), strict=False):
        wanted = own.numpy()
        if found.shape != wanted.shape or not np.allclose(found, wanted, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise ExportError(
                str(path),
                f"nothing was written: {name} of the program differ from the policy's on {len(wanted)} observations",
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporters say of packages that policies do not use, and of their own deprecated parts."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
