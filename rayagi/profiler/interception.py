"""Which native functions are recorded, and as what; by the package that defines them."""

from __future__ import annotations

import importlib.util
import re
import sys
import threading
import time
from _ctypes import CFuncPtr
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

from rayagi.profiler.errors import ProfilerError
from rayagi.profiler.layout import Category
from rayagi.profiler.native import EventRecorder

PACKAGES: Mapping[str, Category] = {
    "mujoco": Category.SIMULATOR,
    "envpool": Category.SIMULATOR,
    "warp": Category.SIMULATOR,
    "isaacgym": Category.SIMULATOR,
    "ale_py": Category.SIMULATOR,
    "Box2D": Category.SIMULATOR,
    "torch": Category.BACKEND,
    "ray": Category.COMMUNICATION,
    "jaxlib": Category.OTHER_NATIVE,
}
"""Packages whose native functions are recorded. Time in all others counts as their caller's: as Python, mostly."""

_TORCH = (
    ("torch._C._VariableFunctions", "torch", Category.BACKEND),
    ("torch._C.TensorBase", "Tensor", Category.BACKEND),
    ("torch._C._nn", "torch.nn", Category.BACKEND),
    ("torch._C._linalg", "torch.linalg", Category.BACKEND),
    ("torch._C._fft", "torch.fft", Category.BACKEND),
    ("torch._C._special", "torch.special", Category.BACKEND),
    ("torch._C._sparse", "torch.sparse", Category.BACKEND),
    ("torch.autograd.Variable._execution_engine.__class__", "autograd", Category.BACKEND),
    ("torch._C._distributed_c10d.ProcessGroup", "ProcessGroup", Category.COMMUNICATION),
    ("torch._C._distributed_c10d.Work", "Work", Category.COMMUNICATION),
    ("torch._C._distributed_c10d.Store", "Store", Category.COMMUNICATION),
)
"""Owners of torch's operators, how they are named in a profile, and as what they count. Torch's other native functions are
not recorded: they describe tensors or build graphs."""
_JAX = (
    ("jaxlib._jax", "jaxlib", None),
    ("jaxlib._jax.PjitFunction", "PjitFunction", None),
    ("jaxlib._jax.ArrayImpl", "ArrayImpl", None),
    ("jaxlib._jax.LoadedExecutable", "LoadedExecutable", None),
    ("jaxlib._jax.ExecuteResults", "ExecuteResults", None),
    ("jaxlib._jax.Client", "Client", None),
)
"""Of JAX: what `jax.jit` returns, arrays, compilation, execution. Its thousands of others build graphs. They count
as the package does, since JAX is the simulator of some."""
_LEFT_OUT: Mapping[str, re.Pattern[str]] = {
    "torch": re.compile(
        r"_has_torch_function|is_|_is_|get_|_get_|_log_api|_disabled_torch|__torch|__dlpack|_version$|"
        r"(stride|size|dim|ndimension|numel|nelement|data_ptr|storage_offset|element_size|requires_grad_?|has_names)$"
    ),
    "ray": re.compile("run_task_loop$"),
    "jaxlib": re.compile(
        r"_*(is|get|set)_|__(init|getstate|setstate|getattr|str|repr|len|eq|hash)__$|(id|index|count)$"
    ),
}
"""What only describes an object; of Ray a worker's whole life: what it calls would count as communication."""
_OWNERS: Mapping[str, tuple[tuple[str, str, Category | None], ...]] = {
    "torch": _TORCH,
    "ray": (("ray._raylet.CoreWorker", "CoreWorker", Category.COMMUNICATION),),
    "jaxlib": _JAX,
}
_PROPERTIES = {"mujoco": ("MjData", "MjModel")}
"""Classes whose properties are recorded, for packages that have more than there are trampolines."""
_WRAPPED = {
    "mujoco": (
        *("mj_step", "mj_step1", "mj_step2", "mj_forward", "mj_forwardSkip", "mj_inverse", "mj_resetData"),
        *("mj_kinematics", "mj_rnePostConstraint", "mj_getState", "mj_setState", "mj_resetDataKeyframe"),
    )
}
"""The simulator's few calls that are wrapped where there is no compiler."""

_NATIVE_KINDS = ("instancemethod", "cython_function_or_method", "nb_func", "nb_method")
"""Types of functions of pybind11, Cython and nanobind."""

Function = tuple[str, Any, Category]
"""Name in the profile, function object, category."""


def packages_with(simulators: Sequence[str], natives: Sequence[str] = ()) -> dict[str, Category]:
    """PACKAGES, a user's own simulators, and modules that count as other native code.

    Raises:
        ProfilerError: there is no such module, or it is a module within a package.
    """
    for name in (*simulators, *natives):
        if "." in name or not name.isidentifier():
            raise ProfilerError(f"{name!r} is not the name of a top-level module; name its package")
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            raise ProfilerError(f"there is no module {name!r} to intercept; is its folder on PYTHONPATH?")
    others = dict.fromkeys(natives, Category.OTHER_NATIVE)
    return {**PACKAGES, **others, **dict.fromkeys(simulators, Category.SIMULATOR)}


class Interception:
    """Records the native calls of some packages: of those that are imported, and of others when they are.

    Attributes:
        counts: by package, functions that are recorded and those for which no trampoline was left
        keeps: False: switches each interception off at once, to measure what installing alone costs
    """

    def __init__(
        self,
        recorder: EventRecorder,
        intern_all: Callable[[list[str]], list[int]],
        packages: Mapping[str, Category],
        *,
        keeps: bool = True,
        torch_is_imported: Callable[[], None] | None = None,
    ) -> None:
        self.keeps = keeps
        self._torch_is_imported = torch_is_imported
        self.counts: dict[str, dict[str, int]] = {}
        self._recorder, self._intern_all, self._packages = recorder, intern_all, packages
        self._wrapped: list[tuple[ModuleType, str, Any, Any]] = []
        self._callers, self._symbols = _Callers(packages), _Symbols(intern_all)
        self._finder = _Finder(packages, self._intercept)

    def install(self) -> None:
        """Intercept what is imported, and watch what will be."""
        sys.meta_path.insert(0, self._finder)
        if hasattr(self._recorder, "swap"):
            self._switch_families(self.keeps)
        for package in self._packages:
            if package in sys.modules:
                self._intercept(package)

    def remove(self) -> None:
        """Undo it. Copies of a wrapper that the program has made go on, but record nothing."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        native: Any = self._recorder
        if hasattr(native, "restore"):
            native.restore()
            self._switch_families(False)
        for module, name, original, wrapper in self._wrapped:
            if vars(module).get(name) is wrapper:
                setattr(module, name, original)
        self._wrapped.clear()

    def switch(self, keeps: bool) -> None:
        """Take all interceptions out, or put them in again. It is cheap, so that what follows does not pay for it."""
        self.keeps = keeps
        native: Any = self._recorder
        if hasattr(native, "switch_calls"):
            native.switch_calls(keeps)
            self._switch_families(keeps)
        for module, name, original, wrapper in self._wrapped:
            if vars(module).get(name) is (original if keeps else wrapper):
                setattr(module, name, wrapper if keeps else original)

    def _switch_families(self, keeps: bool) -> None:
        """Indexing of tensors and calls of ctypes: of types that are subclasses by now, too."""
        native: Any = self._recorder
        if not keeps:
            for each in _types_below(_resolve("torch._C.TensorBase")):
                native.restore_items(each)
            for each in _types_below(CFuncPtr):
                native.restore_ctypes(each)
            return
        if "torch" in self.counts:
            get_name, set_name = self._intern_all(["Tensor.__getitem__", "Tensor.__setitem__"])
            for each in _types_below(_resolve("torch._C.TensorBase")):
                native.swap_items(each, get_name, set_name, Category.BACKEND)
        for each in _types_below(CFuncPtr):
            native.swap_ctypes(each, self._callers, self._symbols)

    def _intercept(self, package: str) -> None:
        """A package that has been imported, or has imported another extension module."""
        self._install(package)
        if not self.keeps:
            self.switch(False)
        if package == "torch" and self._torch_is_imported is not None:
            self._torch_is_imported()

    def _install(self, package: str) -> None:
        if not hasattr(self._recorder, "swap"):
            self._wrap(package)
            return
        native: Any = self._recorder
        functions = list(native_functions(package, self._packages[package]))
        names = self._intern_all([name for name, _, _ in functions])
        results = [
            native.swap(function, name, category)
            for (_, function, category), name in zip(functions, names, strict=True)
        ]
        count = self.counts.setdefault(package, {"recorded": 0, "too_many": 0})
        count["recorded"] += results.count(1)
        count["too_many"] = results.count(-1)
        if package == "torch":
            self._switch_families(True)

    def _wrap(self, package: str) -> None:
        """In Python: the few calls of a simulator, in every module of the package that names them."""
        if self._packages[package] is not Category.SIMULATOR:
            return
        count = self.counts.setdefault(package, {"recorded": 0, "too_many": 0})
        wrappers: dict[int, Any] = {}
        for module in list(_modules_of(package)):
            for name, function in list(vars(module).items()):
                if not isinstance(function, BuiltinFunctionType) or _root_of(function) != package:
                    continue
                if package in _WRAPPED and name not in _WRAPPED[package]:
                    continue
                if id(function) not in wrappers:
                    (text,) = self._intern_all([f"{package}.{name}"])
                    wrappers[id(function)] = _wrapper(function, self._recorder, self._packages[package], text)
                    count["recorded"] += 1
                setattr(module, name, wrappers[id(function)])
                self._wrapped.append((module, name, function, wrappers[id(function)]))


def native_functions(package: str, category: Category) -> Iterator[Function]:
    """Functions of an imported package that are recorded, the more important ones first."""
    for path, label, kind in _OWNERS.get(package, ()):
        for name, function in _members(_resolve(path)):
            if not _LEFT_OUT[package].match(name):
                yield f"{label}.{name}", function, category if kind is None else kind
    if package in _OWNERS:
        return
    yield from _package_functions(package, category)


def _package_functions(package: str, category: Category) -> Iterator[Function]:
    """Functions, then methods, then properties of any package's native modules; enumerations are left out."""
    classes: dict[type, None] = {}
    for module in list(_modules_of(package)):
        for name, value in list(vars(module).items()):
            if isinstance(value, type):
                if _module_of_type(value).partition(".")[0] == package and not hasattr(value, "__members__"):
                    classes[value] = None
            elif _is_native(value) and _root_of(value) == package:
                yield f"{package}.{name}", value, category
    for each in classes:
        for name, function in _members(each):
            yield f"{each.__name__}.{name}", function, category
    of_interest = _PROPERTIES.get(package)
    for each in classes:
        for name, value in list(vars(each).items()):
            if of_interest is not None and each.__name__ not in of_interest:
                break
            if isinstance(value, property) and _is_native(value.fget):
                yield f"{each.__name__}.{name}", value.fget, category


def _members(owner: Any) -> Iterator[tuple[str, Any]]:
    """Native functions of a module or a namespace object, and a type's own; the type itself is for calls of its objects.

    What is inherited may be `object`'s, and a definition of `__new__` is shared by all types: neither may be touched.
    """
    if isinstance(owner, type):
        own = {name: getattr(value, "__func__", value) for name, value in list(vars(owner).items())}
        if isinstance(own.get("__call__"), WrapperDescriptorType) and not issubclass(owner, type):
            yield "__call__", owner
    else:
        own = {name: getattr(owner, name, None) for name in dir(owner) if not name.startswith("__")}
    for name, value in own.items():
        if name != "__new__" and _is_native(value):
            yield name, value


def _is_native(value: Any) -> bool:
    """Function, method, or one of another library's kind; the recorder decides whether it can be swapped."""
    kind = type(value)
    return (
        issubclass(kind, (BuiltinFunctionType, MethodDescriptorType, ClassMethodDescriptorType))
        or kind.__name__ in _NATIVE_KINDS
    )


def _root_of(function: Any) -> str:
    """Top-level package that defines a function."""
    home = getattr(function, "__module__", None)
    if not isinstance(home, str):
        owner = getattr(function, "__self__", None)
        home = owner.__name__ if isinstance(owner, ModuleType) else _module_of_type(type(owner))
    return home.partition(".")[0]


def _module_of_type(kind: type) -> str:
    home = getattr(kind, "__module__", None)
    return home if isinstance(home, str) else ""


def _modules_of(package: str) -> Iterator[ModuleType]:
    for name, module in list(sys.modules.items()):
        if (name == package or name.startswith(f"{package}.")) and isinstance(module, ModuleType):
            yield module


def _resolve(path: str) -> Any:
    """An attribute below a module that is imported; None if this version or build has none."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        found: Any = sys.modules.get(".".join(parts[:length]))
        if found is not None:
            for name in parts[length:]:
                found = getattr(found, name, None)
            return found
    return None


def _types_below(base: Any) -> Iterator[type]:
    """A type and all its subclasses as they are now; none if it is no type."""
    waiting: list[type] = [base] if isinstance(base, type) else []
    found: dict[type, None] = {}
    while waiting:
        each = waiting.pop()
        if each not in found:
            found[each] = None
            waiting += type.__subclasses__(each)
    yield from found


class _Callers(dict[str, int]):
    """Categories of calls by ctypes, by the name of the module that calls; -1 if its package is not recorded."""

    def __init__(self, packages: Mapping[str, Category]) -> None:
        super().__init__()
        self._packages = packages

    def __missing__(self, module: str) -> int:
        found = self[module] = int(self._packages.get(module.partition(".")[0], -1))
        return found


class _Symbols(dict[str | None, int]):
    """Ids of names of functions of ctypes; None is for those without a symbol, such as what Warp compiles for a CPU."""

    def __init__(self, intern_all: Callable[[list[str]], list[int]]) -> None:
        super().__init__()
        self._intern_all = intern_all

    def __missing__(self, symbol: str | None) -> int:
        (found,) = self._intern_all([symbol or "compiled function"])
        self[symbol] = found
        return found


_depth = threading.local()


def _wrapper(function: Any, recorder: EventRecorder, category: Category, name: int) -> Any:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        depth = getattr(_depth, "value", 0)
        _depth.value = depth + 1
        start = time.monotonic_ns()
        try:
            return function(*args, **kwargs)
        finally:
            recorder.record(start, time.monotonic_ns(), category, name, depth)
            _depth.value = depth

    call.__qualname__ = function.__name__  # pickle looks it up in its module; pybind11's is that of a class
    return call


class _Finder:
    """First on sys.meta_path: it finds nothing itself, but hears of the packages' modules after their import."""

    def __init__(self, packages: Iterable[str], imported: Callable[[str], None]) -> None:
        self._packages, self._imported = frozenset(packages), imported
        self._asking: set[tuple[int, str]] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The usual spec. Its loader stays the same object, as others ask it for resources; one method of it is replaced.

        A loader whose methods cannot be replaced is left as it is, so its module is not intercepted.
        """
        package, request = name.partition(".")[0], (threading.get_ident(), name)
        if package not in self._packages or request in self._asking:
            return None  # asked by a finder that asks all others, too
        self._asking.add(request)
        try:
            # Python 3.11 still asks finders without find_spec, in a way of its own.
            finders = [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
            specs = (each.find_spec(name, path, target) for each in finders)
            spec = next((each for each in specs if each is not None), None)
        finally:
            self._asking.discard(request)
        loader: Any = None if spec is None else spec.loader
        is_of_interest = name == package or isinstance(loader, ExtensionFileLoader)
        if is_of_interest and not isinstance(loader, type) and hasattr(loader, "exec_module"):
            with suppress(AttributeError):
                loader.exec_module = self._then_intercept(loader, package)
        return spec

    def _then_intercept(self, loader: Any, package: str) -> Callable[[ModuleType], None]:
        """After the package, and after an extension module that is imported later than it."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            spec = getattr(sys.modules.get(package), "__spec__", None)
            if module.__name__ == package or not getattr(spec, "_initializing", False):
                self._imported(package)

        return exec_module
