"""All kernels are declared, loaded and chosen in one place, have a reference, and are compared with it by a test."""

import ast
import functools
import importlib
import logging
import pkgutil
import re
from pathlib import Path

import pytest
from kernel_programs import LOADED

from collectives import kernels
from collectives.compiler import CompilerError
from collectives.kernels import Kernel
from collectives.mirrors import MirrorError

ROOT = Path(__file__).parents[3]
PACKAGES = ("collectives", "placement", "actors", "rayagi")
SEAM = "collectives/kernels.py"
RECORDER = "rayagi/profiler/native.py"
"""The profiler's extension of Python: no kernel with a reference, but a recorder with another one in Python."""

COMPARED = {
    "shared words": "collectives/test_shared_words.py::test_words_hold_what_is_stored",
    "operations in shared memory": (
        "collectives/test_shm_kernel.py::test_chunks_that_anyone_claims_give_what_the_definition_says"
    ),
    "replay stores": "replay/test_trees.py::test_draws_are_those_of_the_readable_descent",
    "acting": "native/test_acting.py::test_it_fills_what_operations_fill",
    "learning": "native/test_ppo.py::test_updates_are_those_of_torch",
    "MuJoCo's worlds": "envs/test_world_loops.py::test_both_loops_have_the_same_bits",
    "tasks' formulas": "envs/test_whole_rollouts.py::test_a_rollout_is_the_stepwise_one",
    "tasks' rules": "envs/test_compiled_tasks.py::test_compiled_functions_agree_with_torch",
    "overlap of intervals": "profiler/test_sweep.py::test_times_are_those_of_the_reference",
    "fused simulators": "envs/test_fused_c.py::test_the_c_backend_agrees_with_the_reference",
}
"""The test that compares each kernel with its reference, below tests/unit."""


@functools.cache
def trees():
    """Every module of the packages, parsed, by its path."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


@functools.cache
def nodes():
    """All nodes of every module, by its path."""
    return {path: list(ast.walk(tree)) for path, tree in trees().items()}


def modules_with(found):
    """Paths of the modules that have a node of which ``found`` is true."""
    return {path for path, own in nodes().items() if any(map(found, own))}


def called(node):
    """The last name of what is called; empty where nothing is."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def module_of(path):
    return importlib.import_module(path.removesuffix(".py").replace("/", "."))


@functools.cache
def declared():
    """Every kernel by its name."""
    modules = [module_of(path) for path in sorted(modules_with(lambda node: called(node) == "Kernel"))]
    own = [
        kernel
        for module in modules
        for kernel in vars(module).values()
        if isinstance(kernel, Kernel) and kernel.module == module.__name__
    ]
    names = [kernel.name for kernel in own]
    assert len(set(names)) == len(names)
    calls = [node for own in nodes().values() for node in own if called(node) == "Kernel"]
    assert len(calls) == len(own), "a kernel is declared elsewhere than at the top of its module"
    return dict(zip(names, own, strict=True))


def test_each_kernel_has_an_example_and_a_test_that_compares_it():
    assert set(declared()) == set(LOADED) == set(COMPARED)


@pytest.mark.parametrize("name", COMPARED)
def test_each_kernel_has_a_reference_in_python_and_a_comparison(name):
    reference = pkgutil.resolve_name(declared()[name].reference)
    assert callable(reference)
    path, test = COMPARED[name].split("::")
    assert re.search(rf"^def {test}\(", (ROOT / "tests" / "unit" / path).read_text(), re.MULTILINE)


@pytest.fixture
def loads(monkeypatch):
    """Names and programs of kernels as they are loaded."""
    seen, real = [], Kernel.load

    def load(self, program, **mirrors):
        library = real(self, program, **mirrors)
        seen.append((self.name, program))
        return library

    monkeypatch.setattr(Kernel, "load", load)
    return seen


def test_each_kernel_can_be_loaded_and_all_c_belongs_to_one(loads):
    for name, load in LOADED.items():
        load()
        assert name in [loaded for loaded, _ in loads]
    programs = [program for _, program in loads]
    sources = [path for package in PACKAGES for end in "ch" for path in (ROOT / package).rglob(f"*.{end}")]
    recorder = {(ROOT / RECORDER).parent / name for name in module_of(RECORDER).SOURCES}
    sources = [path for path in sources if path not in recorder]
    assert sources
    unused = [
        str(path.relative_to(ROOT))
        for path in sources
        if not any(path.read_text().strip() in program for program in programs)
    ]
    assert unused == []


def imports_compiler(node):
    """Whether a node gives its module the function that compiles and loads."""
    if isinstance(node, ast.ImportFrom):
        names = {alias.name for alias in node.names}
        if node.module == "collectives.compiler":
            return bool(names - {"CompilerError", "machine"})
        return node.module == "collectives" and "compiler" in names
    return isinstance(node, ast.Import) and "collectives.compiler" in {alias.name for alias in node.names}


def test_one_module_compiles_and_loads():
    assert modules_with(imports_compiler) == {SEAM, RECORDER}


def opens_a_library(node):
    """Whether a node opens another library than this process's own symbols."""
    if called(node) in ("PyDLL", "LoadLibrary", "dlopen"):
        return True
    return called(node) == "CDLL" and not (
        node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value is None
    )


def test_no_library_is_loaded_by_another_way():
    # The first loads what was compiled, the second the library of the mujoco package; the third asks whether EGL is there,
    # the fourth asks CUDA's driver. The last two take a function of what was compiled that needs the interpreter's lock.
    assert modules_with(opens_a_library) == {
        "collectives/compiler.py",
        "rayagi/native/worlds.py",
        "rayagi/envs/opengl.py",
        "rayagi/device_replay/zero_copy.py",
        "actors/replay/kernel.py",
        RECORDER,
    }
    others = ("cffi", "torch.utils.cpp_extension", "setuptools", "distutils", "Cython", "numba")
    imported = [
        (path, name)
        for path, own in nodes().items()
        for node in own
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [*(alias.name for alias in node.names), getattr(node, "module", None) or ""]
        if name.startswith(others)
    ]
    assert imported == []


def names(tree):
    """Names that a tree reads."""
    return [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]


def test_one_module_chooses_the_reference():
    deciding = set()
    for path, tree in trees().items():
        raised = [name for node in ast.walk(tree) if isinstance(node, ast.Raise) for name in names(node)]
        if names(tree).count("CompilerError") > raised.count("CompilerError"):
            deciding.add(path)
    # The first has it. The others make a user's error of it: the reference is an engine that users ask for by name, or is no
    # whole store, since Python cannot take the lock.
    users = {"rayagi/envs/fused/c/backend.py", "actors/replay/kernel.py"}
    assert deciding == {"collectives/compiler.py", SEAM, RECORDER, *users}


@pytest.fixture
def example():
    kernels._log_once.cache_clear()
    yield Kernel(
        name="example",
        module="rayagi.example",
        reference="math:fsum",
        without="{} is summed by Python",
        level=logging.WARNING,
    )
    kernels._log_once.cache_clear()


def test_without_a_compiler_the_log_says_once_what_is_used_instead(example, monkeypatch, caplog):
    monkeypatch.setenv("CC", "no-such-compiler")
    for whose in ("this", "this", "that"):
        assert example.made_or_none(lambda: example.load(""), whose=whose) is None
    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "rayagi.example",
            "WARNING",
            f"{whose} is summed by Python: no C compiler (looked for no-such-compiler); install one or set CC",
        )
        for whose in ("this", "that")
    ]


def test_what_a_kernel_cannot_do_is_told_as_a_missing_compiler_is(example, caplog):
    def make():
        raise KeyError("no such sum")

    with pytest.raises(KeyError):
        example.made_or_none(make)
    assert example.made_or_none(make, whose="this", unfit=(KeyError,)) is None
    assert caplog.messages == ["this is summed by Python: 'no such sum'"]


def test_a_difference_is_no_reason_to_use_the_reference(example, monkeypatch):
    with pytest.raises(MirrorError):
        example.made_or_none(lambda: example.load("", mirrors={"1": 2}))

    def refuse(*given, **named):
        raise CompilerError("no C compiler")

    monkeypatch.setattr(kernels, "load", refuse)
    assert example.made_or_none(lambda: example.load("", mirrors={"1": 2})) is None


def test_flags_are_the_compiler_s(example):
    flagged = Kernel(
        name="flagged", module=__name__, reference="math:fsum", without="", flags=("-DNUMBER=7",)
    )
    assert flagged.load("int number(void) { return NUMBER; }").number() == 7
