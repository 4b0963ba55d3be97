"""Calls of native functions are recorded, once each, and nothing notices."""

import _functools
import ctypes
import importlib
import os
import pickle
import subprocess
import sys
import sysconfig
import threading
from collections import Counter
from importlib.machinery import ModuleSpec

import mujoco
import pytest
import torch
import torch.nn.functional as F

from collectives.compiler import load
from rayagi import profiler
from rayagi.profiler import session
from rayagi.profiler.fallback import PythonRecorder
from rayagi.profiler.interception import _Finder, packages_with
from rayagi.profiler.layout import Category
from rayagi.profiler.trace import read_profile
from tests.programs import run_python

reduce = _functools.reduce  # a native function that calls back; copied before it is intercepted
BALL = "<mujoco><worldbody><body><freejoint/><geom size='.1'/></body></worldbody></mujoco>"


def calls(folder, of=("SIMULATOR", "BACKEND", "COMMUNICATION")):
    """Category, name and depth of each native call of a profile, in the order of their ends."""
    return [
        (Category(event["category"]).name, process.name_of(int(event["name"])), int(event["depth"]))
        for process in read_profile(folder).processes
        for thread in process.threads
        for event in thread.events
        if Category(event["category"]).name in of
    ]


def test_each_way_to_call_an_operator_is_one_event(tmp_path):
    a, eye = torch.ones(3), torch.eye(3)
    weight = torch.nn.Parameter(torch.ones(2))
    with profiler.profile(tmp_path / "p"):
        torch.add(a, a)
        a.add(a)
        _ = a + a
        _ = a[0]
        a[0] = 2
        _ = weight[0]
        F.linear(a, eye)
        loss = weight.sum()
        loss.backward()
    assert Counter(name for _, name, _ in calls(tmp_path / "p")) == {
        "torch.add": 1,
        "Tensor.add": 1,
        "Tensor.__add__": 1,
        "Tensor.__getitem__": 2,
        "Tensor.__setitem__": 1,
        "torch.nn.linear": 1,
        "Tensor.sum": 1,
        "autograd.run_backward": 1,
        "torch.ones_like": 1,  # of backward
    }
    assert {category for category, _, _ in calls(tmp_path / "p")} == {"BACKEND"}


def test_the_simulator_is_recorded_with_its_properties(tmp_path):
    model = mujoco.MjModel.from_xml_string(BALL)
    data = mujoco.MjData(model)
    with profiler.profile(tmp_path / "p"):
        mujoco.mj_step(model, data)
        _ = data.qpos
    names = [("SIMULATOR", "mujoco.mj_step", 0), ("SIMULATOR", "MjData.qpos", 0)]
    assert calls(tmp_path / "p") == names


def test_all_functions_find_a_trampoline(tmp_path):
    with profiler.profile(tmp_path / "p") as recording:
        counts = recording._interception.counts
    assert counts["torch"]["recorded"] > 1500
    assert counts["mujoco"]["recorded"] > 800
    assert {each["too_many"] for each in counts.values()} == {0}
    assert read_profile(tmp_path / "p").intercepted["mujoco"] == "simulator"


def test_nothing_of_object_and_no_new_is_touched(tmp_path):
    with profiler.profile(tmp_path / "p"):

        class Fresh:  # object.__init_subclass__
            pass

        dir(Fresh())
        format(Fresh(), "")
        Fresh().__reduce_ex__(4)
        dict.__new__(dict)
        assert session.load_recorder().swap(object.__new__, 1, Category.BACKEND) == 0
        assert session.load_recorder().swap(test_nothing_of_object_and_no_new_is_touched, 1, 17) == 0
    assert calls(tmp_path / "p") == []


def test_leaving_the_profile_undoes_everything(tmp_path):
    a = torch.ones(3)
    before = len(sys.meta_path)
    with profiler.profile(tmp_path / "p"):

        class Fresh(torch.Tensor):  # copies the tensor's slots while they are swapped
            pass

        kept = torch.ones(3).as_subclass(Fresh)
    with profiler.profile(tmp_path / "q", intercept=False):
        torch.add(a, a)
        assert float(kept[0]) == float(a[0]) == 1
    assert calls(tmp_path / "q") == []
    assert len(sys.meta_path) == before
    with profiler.profile(tmp_path / "r"):  # and again
        torch.add(a, a)
        _ = kept[0]
    assert {name for _, name, _ in calls(tmp_path / "r")} >= {"torch.add", "Tensor.__getitem__"}


UNAWARE = """
import pickle
import sys
import textwrap

import torch

from rayagi import profiler

layer = torch.nn.Linear(3, 3)
x = torch.ones(1, 3)
expected = layer(x)


def h(x):
    return torch.relu(x + 1).sum() * torch.tanh(x)


with profiler.profile(sys.argv[1]):
    assert pickle.loads(pickle.dumps(torch.add)) is torch.add
    compiled = torch.compile(h, backend="eager", fullgraph=True)(x)
    scripted = torch.jit.script(torch.nn.Sequential(layer, torch.nn.Tanh()))(x)
    mapped = torch.func.vmap(torch.sin)(x)
    torch.optim.Adam(layer.parameters()).step()
assert torch.equal(compiled, h(x))
assert torch.equal(scripted, expected.tanh())
assert torch.equal(mapped, x.sin())
"""


def test_pickle_compile_script_and_vmap_do_not_notice(tmp_path):
    """In a process of its own: torch._dynamo, which knows functions by identity, is imported while they are swapped."""
    script = tmp_path / "unaware.py"
    script.write_text(UNAWARE)
    command = [sys.executable, str(script), str(tmp_path / "p")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "torch.relu" in {name for _, name, _ in calls(tmp_path / "p")}


def test_an_error_passes_through_and_leaves_no_depth(tmp_path):
    with profiler.profile(tmp_path / "p", simulators=["_functools"]):
        with pytest.raises(RuntimeError, match="must match"):
            torch.add(torch.ones(2), torch.ones(3))
        with pytest.raises(ZeroDivisionError):
            reduce(lambda a, b: reduce(lambda c, d: c / 0, [1, 2]), [1, 2])
        reduce(max, [1, 2])
    found = [each for each in calls(tmp_path / "p") if each[1] in ("torch.add", "_functools.reduce")]
    names = ["torch.add", *["_functools.reduce"] * 3]
    assert [(name, depth) for _, name, depth in found] == list(zip(names, [0, 1, 0, 0], strict=True))


def test_calls_nest_through_python(tmp_path):
    with profiler.profile(tmp_path / "p", simulators=["_functools"]):
        reduce(lambda a, b: torch.add(a, b), [torch.ones(1)] * 3)
    found = [each for each in calls(tmp_path / "p") if each[1] in ("torch.add", "_functools.reduce")]
    assert found == [("BACKEND", "torch.add", 1)] * 2 + [("SIMULATOR", "_functools.reduce", 0)]


def test_each_thread_records_its_own_calls(tmp_path):
    a = torch.ones(1)

    def work():
        for _ in range(500):
            torch.add(a, a)

    with profiler.profile(tmp_path / "p"):
        workers = [threading.Thread(target=work) for _ in range(4)]
        for each in workers:
            each.start()
        for each in workers:
            each.join()
    (process,) = read_profile(tmp_path / "p").processes
    add = next(number for number, text in process.names.items() if text == "torch.add")
    assert sorted(int((thread.events["name"] == add).sum()) for thread in process.threads)[-4:] == [500] * 4


def test_a_call_during_which_the_window_ends_is_not_recorded(tmp_path):
    schedule = profiler.Schedule(warm_up=0, record=1, skip=1, repeat=2)

    def turn(a, b):
        with profiler.iteration():
            reduce(max, [1, 2])

    with profiler.profile(tmp_path / "p", simulators=["_functools"], schedule=schedule):
        reduce(turn, range(6))  # windows begin and end within it
    found = [each for each in calls(tmp_path / "p") if each[1] == "_functools.reduce"]
    assert found == [("SIMULATOR", "_functools.reduce", 0)] * 2


def test_a_fork_within_a_call_records_it_in_the_parent_only(tmp_path):
    def fork(a, b):
        child = os.fork()
        if not child:
            reduce(max, [1, 2])
            return 0
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return child

    with profiler.profile(tmp_path / "p", simulators=["_functools"]):
        if not reduce(fork, [1, 2]):
            os._exit(0)
    found = Counter(
        (process.name.endswith("(forked)"), process.name_of(int(event["name"])), int(event["depth"]))
        for process in read_profile(tmp_path / "p").processes
        for thread in process.threads
        for event in thread.events
        if process.name_of(int(event["name"])) == "_functools.reduce"
    )
    assert found == {(False, "_functools.reduce", 0): 1, (True, "_functools.reduce", 1): 1}


CALLS_BY_CTYPES = """
import ctypes

strlen = ctypes.CDLL(None).strlen
strlen.argtypes = [ctypes.c_char_p]


def by_symbol(text):
    return strlen(text)


def at_an_address(text):
    prototype = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_char_p, ctypes.c_int8)  # a new type at the first call
    return prototype(ctypes.cast(strlen, ctypes.c_void_p).value)(text, 0)
"""


@pytest.fixture
def module_with_ctypes(tmp_path, monkeypatch):
    (tmp_path / "calls_by_ctypes.py").write_text(CALLS_BY_CTYPES)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("calls_by_ctypes")
    del sys.modules["calls_by_ctypes"]


def test_a_call_by_ctypes_counts_for_the_package_that_makes_it(tmp_path, module_with_ctypes):
    with profiler.profile(tmp_path / "p", simulators=["calls_by_ctypes"]) as recording:
        assert module_with_ctypes.by_symbol(b"four") == 4
        assert module_with_ctypes.at_an_address(b"seven..") == 7
        with pytest.raises(ctypes.ArgumentError):
            module_with_ctypes.by_symbol(1.5)
        assert module_with_ctypes.strlen(b"not of the package") == 18
        recording._interception.switch(False)
        module_with_ctypes.by_symbol(b"")
        recording._interception.switch(True)
        module_with_ctypes.by_symbol(b"")
    with profiler.profile(tmp_path / "q", intercept=False):
        module_with_ctypes.by_symbol(b"")
        module_with_ctypes.at_an_address(b"")
    names = ["strlen", "compiled function", "strlen", "strlen"]
    assert calls(tmp_path / "p") == [("SIMULATOR", name, 0) for name in names]
    assert calls(tmp_path / "q") == []


def test_calls_of_warp_s_libraries_are_the_simulator_s(tmp_path):
    warp = pytest.importorskip("warp")
    warp.config.quiet = True
    with profiler.profile(tmp_path / "p"):
        values = warp.full(3, 2.0, dtype=float, device="cpu")
        copy = warp.clone(values)
    assert copy.numpy().tolist() == [2, 2, 2]
    found = [name for category, name, _ in calls(tmp_path / "p") if category == "SIMULATOR"]
    assert found
    assert all(name.startswith("wp_") for name in found)


CALLABLES = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
typedef struct { PyObject_HEAD vectorcallfunc call; } Object;
static PyObject *count(PyObject *self, PyObject *const *args, size_t n, PyObject *names) {
    Py_ssize_t named = names ? PyTuple_GET_SIZE(names) : 0;
    return Py_BuildValue("nn", PyVectorcall_NARGS(n), named);
}
static PyMemberDef members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(Object, call), READONLY}, {NULL}};
static PyType_Slot slots[] = {{Py_tp_call, PyVectorcall_Call}, {Py_tp_members, members}, {0, NULL}};
enum { FLAGS = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL };
static PyType_Spec function = {"nanobind.nb_func", sizeof(Object), 0, FLAGS, slots};
static PyType_Spec compiled = {"callables.Compiled", sizeof(Object), 0, FLAGS, slots};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "callables", NULL, -1, NULL};
static int add(PyObject *module, PyType_Spec *spec, const char *type_name, const char *name) {
    PyObject *type = PyType_FromSpec(spec);
    Object *object = type ? PyObject_New(Object, (PyTypeObject *)type) : NULL;
    if (!object) return -1;
    object->call = count;
    if (type_name && PyModule_AddObject(module, type_name, type)) return -1;
    return PyModule_AddObject(module, name, (PyObject *)object);
}
PyObject *make(void) {
    PyObject *module = PyModule_Create(&definition);
    if (!module || add(module, &function, NULL, "function")) return NULL;
    return add(module, &compiled, "Compiled", "compiled") ? NULL : module;
}
"""


@pytest.fixture
def callables(monkeypatch):
    """A module with a function as nanobind makes them, and an object that can be called as JAX's compiled functions are."""
    include = sysconfig.get_paths()["include"]
    program = CALLABLES.replace("#include <stddef.h>", "#include <stddef.h>\n#include <structmember.h>")
    make = ctypes.PyDLL(None, handle=load(program, (f"-I{include}",))._handle).make
    make.restype = ctypes.py_object
    module = make()
    monkeypatch.setitem(sys.modules, "callables", module)
    return module


def test_functions_of_nanobind_and_objects_of_native_types_are_recorded(tmp_path, callables):
    flag = 1 << 11  # Py_TPFLAGS_HAVE_VECTORCALL
    type(callables.function).__module__ = "callables"  # nanobind answers with the function's own
    with profiler.profile(tmp_path / "p", natives=["callables"]) as recording:
        assert not callables.Compiled.__flags__ & flag
        assert callables.function(1, 2, a=3) == (2, 1)
        assert callables.compiled(1, a=2, b=3) == (1, 2)
        assert list(map(callables.compiled, [1])) == [(1, 0)]
        recording._interception.switch(False)
        assert callables.Compiled.__flags__ & flag
        assert (callables.function(), callables.compiled()) == ((0, 0), (0, 0))
    assert callables.Compiled.__flags__ & flag
    with profiler.profile(tmp_path / "q", intercept=False):
        assert (callables.function(), callables.compiled()) == ((0, 0), (0, 0))
    names = ["callables.function", *2 * ["Compiled.__call__"]]
    assert calls(tmp_path / "p", of=("OTHER_NATIVE",)) == [("OTHER_NATIVE", name, 0) for name in names]
    assert calls(tmp_path / "q", of=("OTHER_NATIVE",)) == []


def test_jax_is_other_native_code(tmp_path):
    """Compiled functions, also those that are made later, and waits for their results."""
    jax = pytest.importorskip("jax")
    with profiler.profile(tmp_path / "p"):
        double = jax.jit(lambda x: 2 * x)
        assert double(jax.numpy.ones(3)).block_until_ready().tolist() == [2, 2, 2]
    found = {name for _, name, _ in calls(tmp_path / "p", of=("OTHER_NATIVE",))}
    assert found >= {"PjitFunction.__call__", "ArrayImpl.block_until_ready"}
    with profiler.profile(tmp_path / "q", simulators=["jaxlib"]):
        double(jax.numpy.ones(3))
    assert "SIMULATOR" in {category for category, _, _ in calls(tmp_path / "q")}


LATER = """
import sys
import textwrap
from importlib.machinery import ExtensionFileLoader, PathFinder
from rayagi import profiler
name = "_bisect" if "_bisect" not in sys.modules else "_lsprof"
spec = PathFinder.find_spec(name)
if spec is None or not isinstance(spec.loader, ExtensionFileLoader):
    sys.exit(77)
with profiler.profile(sys.argv[1], simulators=[name]) as recording:
    module = __import__(name)
    assert "exec_module" not in vars(module.__spec__.loader)
    print(recording._interception.counts[name]["recorded"])
"""


def test_what_is_imported_later_is_intercepted_too(tmp_path):
    done = run_python(LATER, tmp_path / "p", check=False)
    if done.returncode == 77:
        pytest.skip("this Python has these modules built in")
    assert int(done.stdout) > 0, done.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_here", "there is no module 'no_such_module_here' to intercept"),
        ("mujoco.rollout", "'mujoco.rollout' is not the name of a top-level module"),
        ("", "'' is not the name"),
    ],
)
def test_an_unknown_module_is_named(tmp_path, name, message):
    with (
        pytest.raises(profiler.ProfilerError, match=message),
        profiler.profile(tmp_path / "p", simulators=[name]),
    ):
        pass
    assert not (tmp_path / "p").exists()


def test_a_module_of_the_user_is_a_simulator():
    assert packages_with(["_functools"])["_functools"] is Category.SIMULATOR
    assert packages_with(["torch"])["torch"] is Category.SIMULATOR  # the user's word counts


def test_a_module_of_the_user_is_other_native_code(tmp_path):
    with profiler.profile(tmp_path / "p", natives=["_functools"]):
        reduce(max, [1, 2])
    assert calls(tmp_path / "p", of=("OTHER_NATIVE",)) == [("OTHER_NATIVE", "_functools.reduce", 0)]
    with pytest.raises(profiler.ProfilerError, match="there is no module 'nothing' to intercept"):
        packages_with([], ["nothing"])


@pytest.fixture
def python_recorder(monkeypatch):
    recorder = PythonRecorder()
    monkeypatch.setattr(session, "load_recorder", lambda: recorder)


@pytest.mark.usefixtures("python_recorder")
def test_without_a_compiler_the_simulator_s_few_calls_are_wrapped(tmp_path):
    model = mujoco.MjModel.from_xml_string(BALL)
    data = mujoco.MjData(model)
    original = mujoco.mj_step
    with profiler.profile(tmp_path / "p", simulators=["_functools"]):
        mujoco.mj_step(model, data)
        torch.add(torch.ones(1), torch.ones(1))  # not recorded: no wrapper survives torch.compile
        _functools.reduce(lambda a, b: _functools.reduce(max, [1, 2]), [1, 2])
        with pytest.raises(TypeError):
            mujoco.mj_step(model)
        assert pickle.loads(pickle.dumps(mujoco.mj_step)) is mujoco.mj_step
    assert mujoco.mj_step is original
    assert calls(tmp_path / "p") == [
        ("SIMULATOR", "mujoco.mj_step", 0),
        ("SIMULATOR", "_functools.reduce", 1),
        ("SIMULATOR", "_functools.reduce", 0),
        ("SIMULATOR", "mujoco.mj_step", 0),
    ]


def test_finders_without_find_spec_are_left_out(monkeypatch):
    """Such as those of old versions of six. Python 3.11 ignores them, too, if they find nothing."""
    finder = _Finder(["torch"], lambda _package: None)
    monkeypatch.setattr(sys, "meta_path", [finder, object(), *sys.meta_path])
    assert finder.find_spec("torch.no_such_module", []) is None


def test_interceptions_are_switched_off_and_on_as_they_were(tmp_path):
    """Between turns of a calibration: neither functions nor tensors' indexing are recorded, and then both again."""
    code = """
    import sys, torch
    from rayagi.profiler import profile

    with profile(sys.argv[1]) as session:
        values = torch.ones(3)
        for is_on in (True, False, True):
            session._interception.switch(is_on)
            values[0]
            torch.add(values, 1)
    """
    run_python(code, tmp_path / "p")
    (process,) = read_profile(tmp_path / "p").processes
    names = [process.name_of(int(event["name"])) for event in process.threads[0].events[2:]]
    assert names == ["torch.ones", *2 * ["Tensor.__getitem__", "torch.add"]]


class AsksAllOthers:
    """A finder of another tool, which asks all finders, too."""

    def find_spec(self, name, path=None, target=None):
        others = (each.find_spec(name, path, target) for each in sys.meta_path if each is not self)
        return next(filter(None, others), None)


def test_two_finders_that_ask_all_others_find_modules(monkeypatch):
    finder = _Finder(["torch"], lambda _package: None)
    monkeypatch.setattr(sys, "meta_path", [AsksAllOthers(), finder, *sys.meta_path])
    for asked in sys.meta_path[:2]:
        assert asked.find_spec("torch", None).name == "torch"
        assert asked.find_spec("torch.no_such_module", []) is None


def test_a_loader_whose_methods_cannot_be_replaced_loads(monkeypatch):
    class Loader:
        __slots__ = ()

        def create_module(self, spec):
            return None

        def exec_module(self, module):
            module.is_loaded = True

    class Finder:
        def find_spec(self, name, path=None, target=None):
            return ModuleSpec(name, Loader()) if name == "of_no_file" else None

    finder = _Finder(["of_no_file"], lambda _package: None)
    monkeypatch.setattr(sys, "meta_path", [finder, Finder(), *sys.meta_path])
    assert importlib.import_module("of_no_file").is_loaded
    del sys.modules["of_no_file"]
