"""What a process imports is part of the design: it decides start-up time and memory."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import run_python


@functools.cache
def modules_after(statement):
    """Names of the modules that a fresh interpreter holds after a statement."""
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = run_python(code)
    return set(done.stdout.split())


def test_what_runs_inside_a_gmi_never_imports_rllib():
    # RLlib costs 128 MB a process and a second and a half.
    loaded = modules_after(
        "import actors.gmi, actors.groups, rayagi.algorithms.program, rayagi.coordinator, rayagi.cli.main"
    )
    assert "rayagi.algorithms.ppo" in loaded
    assert "ray.rllib" not in loaded
    assert "ray.tune" not in loaded


@pytest.mark.parametrize("heavy", ["ray", "torch", "mujoco", "matplotlib", "gymnasium"])
def test_help_is_instant_because_nothing_heavy_is_imported(heavy):
    assert heavy not in modules_after("import rayagi, rayagi.cli.parser")


@pytest.mark.parametrize("heavy", ["ray", "torch", "pyarrow"])
def test_replay_stores_need_neither_ray_nor_torch(heavy):
    assert heavy not in modules_after("import actors.replay")


@pytest.mark.parametrize("heavy", ["numpy", "pyarrow", "ray", "torch", "rayagi.algorithms"])
def test_the_profiler_starts_in_any_process_without_anything_heavy(heavy):
    assert heavy not in modules_after("from rayagi import profiler; import rayagi.profiler.injection")


ROOT = Path(__file__).resolve().parents[2]


def test_a_program_beside_a_checkout_named_rayagi_imports_the_package_and_not_that_folder(tmp_path):
    # As in a home folder with a clone. The clone itself has no __init__.py, so it is a namespace package of that name.
    (tmp_path / "rayagi").mkdir()
    program = tmp_path / "program.py"
    program.write_text("from rayagi import PPOConfig")
    subprocess.run([sys.executable, program], timeout=120, check=True)


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "rayagi", "envs", "Ant"],
        # As the script `rayagi`, whose own folder is on Python's path instead of the working folder.
        ["-P", "-c", "from rayagi.cli import run_process; run_process()", "envs", "Ant"],
        ["-c", "from rayagi import PPOConfig"],
    ],
    ids=["module", "script", "program"],
)
@pytest.mark.parametrize(
    ("place", "name"), [("actors/__init__.py", "actors"), ("collectives.py", "collectives")]
)
def test_a_users_package_that_hides_one_of_rayagis_is_named(tmp_path, place, name, command):
    hidden = tmp_path / place
    hidden.parent.mkdir(exist_ok=True)
    hidden.touch()
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode
    assert f"{hidden} hides rayagi's package {name!r} from Python: rename that package" in done.stderr
    assert "Traceback" not in done.stderr or "PPOConfig" in command[-1]


ISAAC_SCRIPT = "rayagi/envs/isaac/host.py"
"""Runs under Pythons that have no rayagi; its docstring says why all of its imports are in functions."""


def hidden_imports(path):
    """Lines of the imports in a module's functions, but those that turn a missing package into an error of ours."""
    tree = ast.parse(path.read_text())
    excused = {
        id(each)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        for handler in node.handlers
        if handler.type is not None and "ImportError" in ast.unparse(handler.type)
        for part in node.body
        for each in ast.walk(part)
    }
    return sorted(
        {
            node.lineno
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for node in ast.walk(function)
            if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in excused
        }
    )


def test_an_import_in_a_function_has_its_reason_beside_it():
    without = []
    for package in ("actors", "collectives", "placement", "rayagi"):
        for path in sorted((ROOT / package).rglob("*.py")):
            lines, hidden = path.read_text().splitlines(), hidden_imports(path)
            for number in hidden:
                above = number - 1
                while above in hidden:  # one reason for several
                    above -= 1
                name = str(path.relative_to(ROOT))
                explained = lines[above - 1].lstrip().startswith("#") or "  # " in lines[number - 1]
                if not explained and name != ISAAC_SCRIPT:
                    without.append(f"{name}:{number}")
    assert without == []
