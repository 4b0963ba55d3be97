"""Structs and constants shared by C and Python: a difference raises an error that names it."""

import ctypes
import itertools
import re

import pytest
from kernel_programs import LOADED

from collectives import compiler, kernels, mirrors
from collectives.compiler import load
from collectives.mirrors import MirrorError, check
from rayagi.native import learning

WITHOUT_MIRRORS = {"shared words", "tasks' formulas", "fused simulators with knobs"}
"""The first two share no struct with Python; the last has those of the fused simulators."""


class Loaded(Exception):
    """Arguments of a kernel's load."""


@pytest.fixture(params=[name for name in LOADED if name not in WITHOUT_MIRRORS])
def loaded(request, monkeypatch):
    """Program, flags and mirrors of a library."""

    def stop(program, flags=(), *, mirrors):
        raise Loaded(program, flags, mirrors)

    with monkeypatch.context() as patched:
        patched.setattr(kernels, "load", stop)
        with pytest.raises(Loaded) as caught:
            LOADED[request.param]()
    return caught.value.args


def swapped(struct):
    """Variants of a struct with two fields of one type exchanged, and these fields' names."""
    fields = [field[:2] for field in struct._fields_]
    for one, other in itertools.combinations(range(len(fields)), 2):
        if fields[one][1] is fields[other][1]:
            order = list(fields)
            order[one], order[other] = order[other], order[one]
            yield (
                (fields[one][0], fields[other][0]),
                type("Swapped", (ctypes.Structure,), {"_fields_": order}),
            )


def test_exchanged_fields_are_named_in_every_struct(loaded):
    program, flags, mirrored = loaded
    variants = {}
    for name, mirror in mirrored.items():
        if not isinstance(mirror, int):
            # C ignores the trailing blanks that make these keys different.
            for number, (fields, variant) in enumerate(swapped(mirror), 1):
                variants[name + " " * number] = (fields, variant)
    assert variants
    with pytest.raises(MirrorError) as caught:
        load(program, (*flags, "-O0"), mirrors={key: variant for key, (_, variant) in variants.items()})
    for key, (fields, _) in variants.items():
        for field in fields:
            assert re.search(
                rf"the place of {re.escape(key)}\.{field} in bytes is \d+ in C and \d+", str(caught.value)
            )


def test_every_constant_is_compared(loaded):
    program, flags, mirrored = loaded
    constants = {name: value for name, value in mirrored.items() if isinstance(value, int)}
    with pytest.raises(MirrorError) as caught:
        load(
            program,
            (*flags, "-O0"),
            mirrors={"1": 2, **{name: value + 7 for name, value in constants.items()}},
        )
    for name, value in {"1": 1, **constants}.items():
        assert f"{name} is {value} in C and" in str(caught.value)


def test_a_field_that_moves_in_the_header_is_named(monkeypatch):
    """Unnoticed, this mistake trains with a share of clipped ratios of 0."""
    real = learning.shared

    def edited(name):
        text = real(name)
        return (
            text.replace("clip_ratio, value_clip, value_coef", "value_clip, clip_ratio, value_coef")
            if name == "ppo.h"
            else text
        )

    monkeypatch.setattr(learning, "shared", edited)
    with pytest.raises(
        MirrorError, match=r"place of Learner\.clip_ratio in bytes is \d+ in C and \d+ in Python"
    ):
        learning.library.__wrapped__()


class Pair(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int64), ("share", ctypes.c_double))


PAIR = "typedef struct { %s } Pair;\n#include <stdint.h>\n"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("long count; long share;", r"the kind of Pair\.share .* is 1 in C and 8 in Python"),
        ("void *count; double share;", r"the kind of Pair\.count .* is 5 in C and 1 in Python"),
        ("int count; double share;", r"the size of Pair\.count in bytes is 4 in C and 8 in Python"),
        ("long count; double share, more;", r"the size of Pair in bytes is 24 in C and 16 in Python"),
        ("long count;", r"no member named .share"),
    ],
)
def test_type_and_size_of_fields(fields, message):
    with pytest.raises(MirrorError, match=message):
        load(PAIR % fields, mirrors={"Pair": Pair})


def test_a_missing_constant_is_an_error_too():
    with pytest.raises(MirrorError, match="ABSENT"):
        load("", mirrors={"ABSENT": 1})


def test_equal_structs_are_no_error():
    library = load(PAIR % "long count; double share;", mirrors={"Pair": Pair, "2 + 3": 5})
    check(library, {"Pair": Pair, "2 + 3": 5})


def qualified_name(cls):
    return f"{cls.__module__}.{cls.__qualname__}"


def test_every_struct_of_the_package_is_compared(monkeypatch):
    """A new struct that is not passed to a loader would not be compared."""
    compared = set()

    def note(library, given):
        compared.update(qualified_name(mirror) for mirror in given.values() if not isinstance(mirror, int))
        mirrors.check(library, given)

    monkeypatch.setattr(compiler, "check", note)
    for use in LOADED.values():
        use()
    packages = ("rayagi.", "collectives.", "actors.", "placement.")
    ours = {
        qualified_name(cls)
        for cls in ctypes.Structure.__subclasses__()
        if cls.__module__.startswith(packages)
    }
    assert ours - compared == {"collectives.futex._Timespec"}  # the system's own
