"""The C that orders accesses to shared memory: as it runs here, under ThreadSanitizer, and for aarch64 under an emulator.

An emulator on x86-64 shows that the program is right for another processor's instructions and system calls; it does not
reorder as that processor may. Missing acquires and releases are ThreadSanitizer's to find, on any processor.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

import collectives
from collectives.futex import BY_MACHINE

HERE, SOURCES = Path(__file__).parent, Path(collectives.__file__).parent
LIMIT_S = 100
EMULATOR = ("aarch64-linux-gnu-gcc", "qemu-aarch64")
needs_emulator = pytest.mark.skipif(
    any(shutil.which(program) is None for program in EMULATOR),
    reason="NOT TESTED FOR AARCH64: apt-get install gcc-aarch64-linux-gnu qemu-user",
)
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="NOT TESTED: needs gcc")


def compiled(folder, kernel, *command):
    """The litmus tests, of a kernel."""
    made = folder / "litmus"
    sources = (f'-DKERNEL_C="{kernel}"', f'-DSHARED_WORDS_C="{SOURCES / "shared_words.c"}"')
    flags = ("-std=gnu11", "-w", "-pthread", *sources, str(HERE / "litmus.c"), "-o", str(made), "-lm")
    subprocess.run([*command, *flags], check=True, timeout=LIMIT_S)
    return str(made)


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


NATIVE = ("gcc", "-O3", "-march=native")
SANITIZED = ("gcc", "-O1", "-g", "-fsanitize=thread")
FOR_ARM = ("aarch64-linux-gnu-gcc", "-O3", "-static")


@pytest.mark.parametrize(
    ("compiler", "emulator", "rounds"),
    [
        pytest.param(NATIVE, (), 2000, id="native", marks=needs_gcc),
        pytest.param(SANITIZED, (), 300, id="ThreadSanitizer", marks=needs_gcc),
        pytest.param(FOR_ARM, ("qemu-aarch64",), 300, id="aarch64", marks=needs_emulator),
    ],
)
@pytest.mark.parametrize("members", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_published_data_is_visible(tmp_path, compiler, emulator, rounds, members):
    litmus = compiled(tmp_path, SOURCES / "transports" / "shm" / "kernel.c", *compiler)
    done = run(*emulator, litmus, str(members), str(rounds))
    assert (done.returncode, done.stdout, done.stderr[-2000:]) == (0, "0 wrong\n", "")


@needs_gcc
def test_the_sanitizer_finds_a_store_that_publishes_nothing(tmp_path):
    text = (SOURCES / "transports" / "shm" / "kernel.c").read_text()
    right = "atomic_store(&slot->arrivals, m->arrivals);"
    assert right in text
    broken = tmp_path / "kernel.c"
    broken.write_text(
        text.replace(right, right.replace("(", "_explicit(").replace(")", ", memory_order_relaxed)"))
    )
    litmus = compiled(tmp_path, broken, *SANITIZED)
    assert "data race" in run(litmus, "2", "100").stderr


@pytest.mark.parametrize(
    ("machine", "compiler"),
    [
        pytest.param("x86_64", "x86_64-linux-gnu-gcc", marks=needs_gcc),
        pytest.param("aarch64", "aarch64-linux-gnu-gcc", marks=needs_emulator),
    ],
)
def test_numbers_of_system_calls_are_those_of_the_system_s_headers(machine, compiler):
    if shutil.which(compiler) is None:
        pytest.skip(f"NOT TESTED: needs {compiler}")
    program = "#include <sys/syscall.h>\nnumbers SYS_futex SYS_membarrier\n"
    done = subprocess.run(
        [compiler, "-E", "-P", "-"], input=program, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-2:] == [str(number) for number in BY_MACHINE[machine]]
