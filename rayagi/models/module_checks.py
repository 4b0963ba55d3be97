"""Checks of a user's network: what is wrong with it, in one sentence, before anything is started."""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from placement.errors import counted
from rayagi.config.errors import ConfigError
from rayagi.config.spec import NetworkSpec

_ROWS = 3
"""Observations of a check."""


def refuse_parameters(spec: NetworkSpec, module: nn.Module) -> None:
    """Refuse parameters that are not float32 or not on the CPU, TorchScript, and a module without any to train."""
    others = [
        f"{name} ({each.dtype})" for name, each in module.named_parameters() if each.dtype != torch.float32
    ]
    if others:
        raise module_error(
            spec, f"has parameters that are not float32: {', '.join(others)}", "convert it with .float()"
        )
    elsewhere = [
        f"{name} ({each.device})" for name, each in module.named_parameters() if each.device.type != "cpu"
    ]
    if elsewhere:
        raise module_error(
            spec,
            f"has parameters on another device: {', '.join(elsewhere)}",
            "make them on the CPU: rayagi moves them",
        )
    scripted = [name for name, each in module.named_modules() if isinstance(each, torch.jit.ScriptModule)]
    if scripted:
        reason = f"has TorchScript at {scripted[0]!r}, which torch does not train after it has acted in inference mode"
        raise module_error(spec, reason, "leave torch.jit.script out")
    if not any(each.requires_grad for each in module.parameters()):
        raise module_error(
            spec,
            "has no parameters to train",
            "assign its layers to attributes of self, after super().__init__()",
        )


def refuse_behaviour(
    spec: NetworkSpec, module: nn.Module, sizes: tuple[int, int, int], *, may_mask: bool
) -> None:
    """Refuse wrong shapes and types, randomness, changed inputs and buffers, and rows that depend on each other.

    ``sizes``: obs_dim, output_dim and state_dim; ``may_mask``: whether outputs are logits, which may be -infinity.
    """
    obs_dim, output_dim, state_dim = sizes
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(_ROWS, obs_dim, generator=generator)]
    if state_dim:
        given.append(torch.randn(_ROWS, state_dim, generator=generator))
    before = {name: each.detach().clone() for name, each in _kept(module).items() if not is_lazy(each)}
    copies = [each.clone() for each in given]
    found = _called(spec, module, copies, (output_dim, state_dim), may_mask)
    for name, one, other in zip(("observations", "states"), given, copies, strict=False):
        if not torch.equal(one, other):
            raise module_error(
                spec, f"changes the {name} that it is given", "compute new tensors: x = x / 2, not x /= 2"
            )
    for name, each in _kept(module).items():
        if name in before and not torch.equal(each, before[name]):
            raise module_error(
                spec,
                f"changes its {name} as it runs, and what forward writes is not exchanged between processes",
                "leave such layers out (BatchNorm); LayerNorm keeps nothing",
            )
    again = _called(spec, module, given, (output_dim, state_dim), may_mask)
    if not all(torch.equal(one, other) for one, other in zip(found, again, strict=True)):
        raise module_error(
            spec,
            "gives other outputs for the same observations at the second call",
            "leave randomness out (Dropout), since rayagi's head draws the actions, and what it keeps between calls, which "
            "is what state_dim is for",
        )
    alone = _called(spec, module, [each[:1] for each in given], (output_dim, state_dim), may_mask)
    if not all(
        torch.allclose(one[:1], other, rtol=1e-3, atol=1e-4) for one, other in zip(found, alone, strict=True)
    ):
        raise module_error(
            spec,
            "gives other outputs for an observation beside others than alone",
            "let every row of the batch depend on that row of the observations only",
        )


def _kept(module: nn.Module) -> dict[str, Tensor]:
    """Buffers and parameters, as "buffer NAME" and "parameter NAME"."""
    return {
        **{f"buffer {name}": each for name, each in module.named_buffers()},
        **{f"parameter {name}": each for name, each in module.named_parameters()},
    }


def _called(
    spec: NetworkSpec, module: nn.Module, given: list[Tensor], sizes: tuple[int, int], may_mask: bool
) -> tuple[Tensor, ...]:
    """``forward`` on observations, and states if it is recurrent; its results are checked."""
    rows, (output_dim, state_dim) = len(given[0]), sizes
    wanted = {"outputs": (rows, output_dim), "values": (rows,)}
    if state_dim:
        wanted["next states"] = (rows, state_dim)
    shapes = " and ".join(str(tuple(each.shape)) for each in given)
    try:
        found = module(*given)
    except Exception as error:  # any exception of the user's code
        what = "observations and states" if state_dim else "observations"
        raise module_error(
            spec,
            f"raises in forward for {what} of shape {shapes}: {error_text(error)}",
            f"return {_listed(wanted)}",
        ) from error
    if not isinstance(found, tuple | list) or len(found) != len(wanted):
        what = (
            counted(len(found), "result") if isinstance(found, tuple | list) else f"a {type(found).__name__}"
        )
        raise module_error(
            spec, f"returns {what} from forward for shape {shapes}", f"return {_listed(wanted)}"
        )
    for reason in _wrong(wanted, found, may_mask):
        raise module_error(
            spec, f"returns {reason} for observations of shape {shapes}", f"return {_listed(wanted)}"
        )
    if not found[0].requires_grad:
        raise module_error(
            spec, "returns outputs without a gradient", "leave detach() and torch.no_grad() out of forward"
        )
    if not found[1].requires_grad and found[1].any():  # all 0: a module for behaviour cloning, say
        raise module_error(
            spec,
            "returns values without a gradient",
            "detach() the trunk, not the values, to keep both apart",
        )
    return tuple(each.detach() for each in found)


def _wrong(wanted: Mapping[str, tuple[int, ...]], found: Any, may_mask: bool) -> Iterator[str]:
    for (name, shape), each in zip(wanted.items(), found, strict=True):
        least = -math.inf if may_mask and name == "outputs" else torch.finfo(torch.float32).min
        if not isinstance(each, Tensor):
            yield f"{name} that are a {type(each).__name__}"
        elif tuple(each.shape) != shape:
            yield f"{name} of shape {tuple(each.shape)}"
        elif each.dtype != torch.float32:
            yield f"{name} of {each.dtype}"
        elif not ((least <= each) & (each < math.inf)).all():
            yield f"{name} that are not finite"


def _listed(wanted: Mapping[str, tuple[int, ...]]) -> str:
    return "float32 " + ", ".join(f"{name} of shape {shape}" for name, shape in wanted.items())


def module_error(spec: NetworkSpec, reason: str, suggestion: str) -> ConfigError:
    """The error of ``network.module``."""
    return ConfigError("network.module", spec.module, reason, suggestion)


def error_text(error: BaseException) -> str:
    """An exception in one line, with the place in the user's code."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_library(frame.filename)]
    at = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{at}: {' '.join(str(error).split())}"


def _is_library(file: str) -> bool:
    return (
        file.startswith(os.path.dirname(__file__)) or "importlib" in file or f"{os.sep}torch{os.sep}" in file
    )
