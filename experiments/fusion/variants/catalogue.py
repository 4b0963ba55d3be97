"""Benchmark variants by name. Modules that need an optional package are imported lazily."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from experiments.fusion.variants.variant import Variant, not_installed
from rayagi.envs.errors import KernelError

_PACKAGE = "experiments.fusion.variants"


@dataclass(frozen=True, slots=True)
class _Entry:
    module: str
    build: Callable[..., Variant]
    package: str | None = None
    extra: str = ""


def _of(name: str, **options: object) -> Callable[..., Variant]:
    return lambda module: getattr(module, name)(**options)


_ENTRIES = {
    "gymnasium": _Entry("gymnasium_variants", _of("GymnasiumVariant", vector=False)),
    "gymnasium-vector": _Entry("gymnasium_variants", _of("GymnasiumVariant", vector=True)),
    "envpool": _Entry("envpool_variant", _of("EnvPoolVariant"), "envpool", "envpool"),
    "torch": _Entry("torch_variants", _of("TorchVariant", compiled=False)),
    "torch.compile": _Entry("torch_variants", _of("TorchVariant", compiled=True)),
    "torch-gpu": _Entry("torch_variants", _of("TorchVariant", compiled=False, device="cuda")),
    "xla": _Entry("jax_variant", _of("JaxVariant"), "jax", "jax"),
    "warp": _Entry("warp_variant", _of("WarpVariant"), "warp", "gpu"),
    "warp-gpu": _Entry("warp_variant", _of("WarpVariant", device="cuda"), "warp", "gpu"),
    "cuda": _Entry("cuda_variant", _of("CudaVariant")),
    "c": _Entry("c_variant", _of("CVariant")),
}
NAMES = tuple(_ENTRIES)
"""Names of the variants, after the paper where it has them."""


def package_missing(name: str) -> str | None:
    """Why a variant's module cannot be imported here; None if it can."""
    entry = _ENTRIES[name]
    return None if entry.package is None else not_installed(entry.package, entry.extra)


def variant(name: str) -> Variant:
    """A variant by its name.

    Raises:
        KernelError: unknown name, or its package is not installed.
    """
    if name not in _ENTRIES:
        raise KernelError(name, f"no such variant; there are {', '.join(NAMES)}")
    reason = package_missing(name)
    if reason:
        raise KernelError(name, reason)
    entry = _ENTRIES[name]
    return entry.build(import_module(f"{_PACKAGE}.{entry.module}"))
