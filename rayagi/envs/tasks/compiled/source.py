"""C printer of a traced task: one C function of one world per task function, between worlds.h and steps.h."""

from __future__ import annotations

from importlib.resources import files

from rayagi.envs.fused.printing import INFIX, Language, print_function
from rayagi.envs.tasks.compiled.expressions import C_FUNCTIONS
from rayagi.envs.tasks.compiled.trace import Assignments, TracedTask, memory_name

C = Language(
    name="C",
    operations={
        **INFIX,
        **{name: f"{name}({{0}})" for name in ("sqrt", "floor", "exp", "log", "sin", "cos", "tan", "tanh")},
        **{name: text for name, (text, _) in C_FUNCTIONS.items()},
        "abs": "fabs({0})", "minimum": "least({0}, {1})", "maximum": "most({0}, {1})",
        "and": "{0} & {1}", "or": "{0} | {1}", "not": "!{0}", "where": "{0} ? {1} : {2}",
    },
    declare={"real": "const double {name} = {value};", "truth": "const int {name} = {value};"},
    infinity="INFINITY",
    not_a_number="NAN",
    truths=("0", "1"),
)  # fmt: skip


def rows_of(traced: TracedTask) -> tuple[str, ...]:
    """Names of the ``Rows`` members of ``TaskWorlds``, (N, size) each, in the struct's order."""
    return (*traced.fields, *map(memory_name, traced.memory), "actions", "controls")


def source(traced: TracedTask, sizes: dict[str, int]) -> str:
    """The complete C program. ``sizes``: values of the macros ACTIONS, OBS and TERMS."""
    draws = {"START_DRAWS": traced.num_start_draws, "STEP_DRAWS": traced.num_step_draws}
    rows = rows_of(traced)
    functions = (
        ("control", traced.control, ""),
        (
            "after_physics",
            traced.after_physics,
            ", float *obs, float *reward, uint8_t *terminated, float *terms",
        ),
        ("observe", traced.observe, ", float *obs"),
        ("start", traced.start, ""),
    )
    return "\n".join(
        [
            *(f"#define {name} {size}" for name, size in (sizes | draws).items()),
            f"#define ROWS Rows {', '.join(rows)};",
            files(__package__).joinpath("worlds.h").read_text(encoding="utf-8"),
            *(_function(name, rule, rows, results) for name, rule, results in functions),
            files(__package__).joinpath("steps.h").read_text(encoding="utf-8"),
        ]
    )


def _function(name: str, rule: Assignments, rows: tuple[str, ...], results: str) -> str:
    """A task function of world ``i``. All values are computed before any is stored, since targets may also be inputs."""
    body = print_function(rule.function, C, {text: text for text in rule.function.inputs})
    stores = [f"{target} = {value};" for target, value in zip(rule.targets, body.outputs, strict=True)]
    return "\n".join(
        [
            f"static void {name}(const TaskWorlds *w, int64_t i, const double *draws{results}) {{",
            *(f"    double *{row} = w->{row}.at + i * w->{row}.stride;" for row in rows),
            *(f"    {line}" for line in (*body.lines, *stores)),
            "}",
        ]
    )
