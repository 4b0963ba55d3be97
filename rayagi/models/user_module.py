"""A user's own network: imported from ``file.py:Class`` or ``package.module:Class``, built from the run's seed, and checked.

A torch module is built as ``Class(obs_dim, output_dim, **network.module_kwargs)``. Its ``forward(obs)`` takes normalised
observations (B, obs_dim) and returns the parameters of the action distribution (B, output_dim) and values (B,). A recurrent
one has an attribute ``state_dim``. Its ``forward(obs, states)`` takes one step from states (B, state_dim) and also returns
the next states; an episode starts with zeros. All tensors are float32.

An RLlib RLModule with torch and values (TorchRLModule, ValueFunctionAPI) is built from the environment's spaces instead,
with ``network.module_kwargs`` as its model_config.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from actors.protocols import EnvInfo
from rayagi.config.errors import ConfigError
from rayagi.config.spec import NetworkSpec
from rayagi.config.trusted_modules import network_file
from rayagi.envs.providers import changed_torch, torch_settings
from rayagi.models.heads import Head, StateGaussianHead, make_head
from rayagi.models.module_checks import error_text, module_error, refuse_behaviour, refuse_parameters
from rayagi.models.recurrent import SequenceNetwork, Sequences, Unrolled

_BUILDING = threading.Lock()


class UserNetwork(nn.Module):
    """A user's module as the network of a JointActorCritic."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, observed: Tensor) -> Tensor:
        """(..., obs_dim) -> (..., output_dim + 1)."""
        outputs, values = self.module(observed.reshape(-1, observed.shape[-1]).float())
        return _joined(outputs, values).view(*observed.shape[:-1], -1)


class UserSequenceNetwork(SequenceNetwork):
    """A user's recurrent module as the network of a JointActorCritic. Sequences are passed step by step."""

    def __init__(self, module: nn.Module, state_dim: int) -> None:
        super().__init__()
        self.module, self._state_dim = module, state_dim

    @property
    def state_dim(self) -> int:
        """The module's."""
        return self._state_dim

    def step(self, observed: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """One call of the module."""
        outputs, values, states = self.module(observed.float(), states)
        return _joined(outputs, values), states

    def unroll(self, observed: Tensor, sequences: Sequences) -> Unrolled:
        """One call of the module for each step."""
        states, outputs, ends = sequences.states, [], {}
        ending = sequences.done.any(1).tolist()
        for step, seen in enumerate(observed):
            joint, states = self.step(seen, states)
            outputs.append(joint)
            if ending[step]:
                ends[step] = states
                states = states * ~sequences.done[step].unsqueeze(-1)
        return Unrolled(torch.stack(outputs), ends, states)


def _joined(outputs: Tensor, values: Tensor) -> Tensor:
    return torch.cat((outputs, values.unsqueeze(-1)), -1)


def user_model(info: EnvInfo, spec: NetworkSpec, seed: int) -> tuple[UserNetwork | UserSequenceNetwork, Head]:
    """The network that ``spec.module`` names, checked with random observations, and its head.

    Initial weights depend on ``seed`` alone.

    Raises:
        ConfigError: it cannot be imported or built, or it does not do what the head of this file says.
    """
    assert spec.module is not None
    before = torch_settings()
    cls = imported_class(spec.module)
    if not issubclass(cls, nn.Module) and not _is_rllib(cls):
        bases = ", ".join(base.__name__ for base in cls.__bases__)
        raise module_error(
            spec, f"is no torch module: its bases are {bases}", "derive it from torch.nn.Module"
        )
    # Lazy layers draw their weights at the first call, that of the checks.
    with _seeded(seed):
        module, head = _rllib_module(info, spec, cls) if _is_rllib(cls) else _torch_module(info, spec, cls)
        if reason := changed_torch(before):
            raise module_error(spec, reason, "leave the call out")
        refuse_parameters(spec, module)
        state_dim = getattr(module, "state_dim", 0)
        if type(state_dim) is not int or state_dim < 0:
            raise module_error(
                spec, f"has state_dim = {state_dim!r}", "make it the number of reals of one state, an int"
            )
        sizes = (info.obs_dim, head.num_outputs, state_dim)
        refuse_behaviour(spec, module, sizes, may_mask=info.action.is_discrete)
    return UserSequenceNetwork(module, state_dim) if state_dim else UserNetwork(module), head


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Set torch's CPU generator to ``seed``, and put it back."""
    with _BUILDING, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _torch_module(info: EnvInfo, spec: NetworkSpec, cls: type[Any]) -> tuple[nn.Module, Head]:
    if cls.forward is nn.Module.forward:
        raise module_error(
            spec, "has no method forward", "write forward(self, obs), which returns outputs and values"
        )
    head = make_head(info.action, spec.initial_log_std, spec.head, free_log_std=spec.free_log_std)
    suggestion = (
        "write __init__(self, obs_dim, output_dim), and name further arguments in network.module_kwargs"
    )
    return _built(spec, cls, suggestion, (info.obs_dim, head.num_outputs), spec.module_kwargs), head


def _is_rllib(cls: type[Any]) -> bool:
    """Whether a class derives from RLlib's RLModule; RLlib itself takes seconds to import."""
    return any(
        base.__name__ == "RLModule" and base.__module__.startswith("ray.rllib") for base in cls.__mro__
    )


def _rllib_module(info: EnvInfo, spec: NetworkSpec, cls: type[Any]) -> tuple[nn.Module, Head]:
    # Imported here: RLlib takes seconds.
    from rayagi.models.rllib_module import constructor_arguments, refuse_unfit_class, wrapped

    refuse_unfit_class(spec, cls)
    suggestion = "build its layers in setup(self), and name its model_config in network.module_kwargs"
    module = _built(spec, cls, suggestion, (), constructor_arguments(info, spec))
    continuous = info.action.kind == "continuous"
    head = StateGaussianHead(info.action.dim) if continuous else make_head(info.action, 0.0)
    return wrapped(spec, module, info), head


def imported_class(reference: str) -> type[Any]:
    """The class that ``file.py:Class`` or ``package.module:Class`` names.

    A file is looked for in the working folder, then in the folders of Python's path, which Ray passes to its workers.

    Raises:
        ConfigError: no such module or class, or the module raises.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise ConfigError(
            "network.module", reference, "names no class", "for example my_net.py:Net, or my_package.nets:Net"
        )
    try:
        module = _file_module(reference, place) if place.endswith(".py") else importlib.import_module(place)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # any exception of the user's code
        raise ConfigError(
            "network.module",
            reference,
            f"{place} cannot be imported: {error_text(error)}",
            f"correct it, or run this where it is ({os.getcwd()} is the working folder)",
        ) from error
    found = getattr(module, name, None)
    if not isinstance(found, type):
        own = [
            key for key, value in vars(module).items() if isinstance(value, type) and not key.startswith("_")
        ]
        what = "has no class of that name" if found is None else f"has a {type(found).__name__} of that name"
        raise ConfigError(
            "network.module", reference, f"{place} {what}", f"its classes are {', '.join(own) or 'none'}"
        )
    return found


def _file_module(reference: str, place: str) -> ModuleType:
    """Run a Python file as a module. It can import modules from its own folder, as a script can."""
    file = network_file(place)
    if file is None:
        raise ConfigError(
            "network.module",
            reference,
            f"there is no file {place} in {os.getcwd()}, nor in a folder of Python's path",
            "run this where it is, give its whole path, or set PYTHONPATH",
        )
    name = f"rayagi_network_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(file.parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module


def _built(
    spec: NetworkSpec,
    cls: Callable[..., nn.Module],
    suggestion: str,
    sizes: tuple[int, ...],
    kwargs: Mapping[str, Any],
) -> nn.Module:
    """Construct the module."""
    try:
        return cls(*sizes, **kwargs)
    except Exception as error:  # any exception of the user's code
        given = ", ".join([*map(str, sizes), *(f"{key}={value!r}" for key, value in kwargs.items())])
        raise module_error(
            spec, f"cannot be built with ({given}): {error_text(error)}", suggestion
        ) from error
