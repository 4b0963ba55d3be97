"""A task's rules as functions of one world's reals: each is called with expressions of a few worlds instead of tensors."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from rayagi.envs.fused.expressions import Node
from rayagi.envs.fused.trace import MAX_NODES, Function
from rayagi.envs.tasks.compiled.expressions import TaskGraph
from rayagi.envs.tasks.compiled.tensors import TracedTensor, Tracing, UntraceableError, users_line
from rayagi.envs.tasks.task import Memory, State, TaskFunctions
from rayagi.envs.tasks.vec_env import stacked_terms

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Assignments:
    """What a rule makes of a world: ``targets[k]``, such as ``obs[3]``, becomes the function's output k."""

    function: Function
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TracedTask:
    """A task's functions. Inputs: ``qpos[0]``, ..., other fields, the memory's parts, actions and draws alike.

    Attributes:
        fields: sizes of the fields' rows by name, qpos and qvel included
        memory: shapes of the memory's parts by name, less the batch
        num_start_draws, num_step_draws: the task's
        control: actions and memory to ``controls`` and memory
        arrive: what followed to ``reward``, ``terminated``, memory, ``terms`` and ``obs``
        observe: to ``obs`` alone, of a world that begins anew
        start: draws to qpos, qvel and memory
    """

    fields: Mapping[str, int]
    memory: Mapping[str, tuple[int, ...]]
    num_start_draws: int
    num_step_draws: int
    control: Assignments
    after_physics: Assignments
    observe: Assignments
    start: Assignments


def trace_task(rules: TaskFunctions[Any], fields: Mapping[str, Tensor]) -> TracedTask:
    """Trace a task's rules, and make sure that what holds for the traced worlds holds for any number of them.

    Args:
        fields: the worlds' fields by name, (N, ...)

    Raises:
        UntraceableError: a rule does something that cannot be compiled; it is named, with its line.
    """
    few, more = (_traced(rules, fields, num_worlds) for num_worlds in (2, 3))
    if few != more:
        raise UntraceableError(type(rules).__name__, "results that depend on the number of worlds")
    return few


def _traced(rules: TaskFunctions[Any], fields: Mapping[str, Tensor], num_worlds: int) -> TracedTask:
    """From so many worlds."""
    task, given = rules.task, rules
    rules = copy.copy(given)
    shapes = {name: _shape_of_field(name, values) for name, values in fields.items()}

    starting = _Tracing(rules, num_worlds)
    start = starting.call(rules.start, starting.inputs("draws", (task.num_start_draws,)))
    memory = {name: _shape_of_memory(name, value) for name, value in start.memory.items()}
    started = starting.assignments({"qpos": start.qpos, "qvel": start.qvel}, start.memory)

    controlling = _Tracing(rules, num_worlds)
    controls, changed = controlling.call(rules.control, controlling.state(shapes, memory))
    controlled = controlling.assignments({"controls": controls}, changed)

    arriving = _Tracing(rules, num_worlds)
    state = arriving.state(shapes, memory)
    outcome = arriving.call(rules.reward_and_done, state)
    state.memory |= outcome.memory
    results = {"reward": outcome.rewards, "terminated": outcome.terminated}
    terms = arriving.call(lambda result: stacked_terms(task, result, None), outcome)
    if terms is not None:
        results["terms"] = terms
    obs = arriving.call(rules.observe, state)
    arrived = arriving.assignments({**results, "obs": obs}, outcome.memory)

    observing = _Tracing(rules, num_worlds)
    obs = observing.call(rules.observe, observing.state(shapes, memory))
    observed = observing.assignments({"obs": obs}, {})

    kept = [name for name, value in vars(rules).items() if vars(given).get(name) is not value]
    if kept:
        reason = f"its functions change its attribute {kept[0]}; what is to be remembered is memory"
        raise UntraceableError(type(rules).__name__, reason)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    return TracedTask(
        sizes, memory, task.num_start_draws, task.num_step_draws, controlled, arrived, observed, started
    )


def _shape_of_field(name: str, values: Tensor) -> tuple[int, ...]:
    if values.dtype != torch.float64:
        raise UntraceableError(f"the field {name}", f"its values are {values.dtype}")
    return tuple(values.shape[1:])


def _shape_of_memory(name: str, values: Tensor) -> tuple[int, ...]:
    if values.dtype != torch.float64:
        raise UntraceableError(
            f"the memory {name!r}",
            f"it is {values.dtype}; make it of the draws' type, such as draws.new_zeros(...)",
        )
    return tuple(values.shape[1:])


class _Tracing:
    """A graph, and what is given to a rule in it: some worlds, each with inputs of its own."""

    def __init__(self, rules: TaskFunctions[Any], num_worlds: int) -> None:
        self.task, self.num_worlds = rules.task, num_worlds
        self.graph = TaskGraph(type(rules).__name__)
        self.mode = Tracing(self.graph)

    def inputs(self, name: str, shape: tuple[int, ...]) -> TracedTensor:
        """A row of each world, (num_worlds, *shape)."""
        size = math.prod(shape)
        names = [f"{world} {name}[{k}]" for world in range(self.num_worlds) for k in range(size)]
        return self.mode.inputs(names, (self.num_worlds, *shape))

    def state(self, fields: Mapping[str, tuple[int, ...]], memory: Mapping[str, tuple[int, ...]]) -> State:
        """What a step's rules see."""
        return State(
            {name: self.inputs(name, shape) for name, shape in fields.items()},
            {name: self.inputs(memory_name(name), shape) for name, shape in memory.items()},
            self.inputs("actions", (self.task.action_dim,)),
            self.inputs("draws", (self.task.num_step_draws,)),
        )

    def call(self, function: Callable[[Any], Result], given: Any) -> Result:
        """Call a rule; whatever it raises on traced tensors is a reason not to compile it."""
        try:
            with torch.no_grad(), self.mode:
                return function(given)
        except UntraceableError:
            raise
        except Exception as error:
            raise UntraceableError(users_line(error), f"{type(error).__name__}: {error}") from error

    def assignments(self, results: Mapping[str, Tensor], memory: Memory) -> Assignments:
        """The results and the memory's parts as targets and their values, of any world."""
        named = {**results, **{memory_name(name): value for name, value in memory.items()}}
        arrays = {name: self.mode.lifted(tensor).exprs for name, tensor in named.items()}
        rows = {name: values.reshape(self.num_worlds, -1) for name, values in arrays.items()}
        targets = tuple(f"{name}[{k}]" for name, row in rows.items() for k in range(row.shape[1]))
        flat = [
            [value.index for row in rows.values() for value in row[world]] for world in range(self.num_worlds)
        ]
        functions = [self._function_of(world, values) for world, values in enumerate(flat)]
        if any(function != functions[0] for function in functions):
            raise UntraceableError(self.graph.place, "results that depend on a world's number")
        return Assignments(functions[0], targets)

    def _function_of(self, world: int, outputs: Sequence[int]) -> Function:
        """What one world's outputs need, in an order that is the same for all worlds."""
        nodes, own = self.graph.nodes, TaskGraph(self.graph.place)
        copies: dict[int, int] = {}
        waiting = list(reversed(outputs))
        while waiting:
            index = waiting[-1]
            node = nodes[index]
            missing = [arg for arg in reversed(node.args) if arg not in copies]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            value = node.value
            if node.op == "input":
                whose, _, value = str(value).partition(" ")
                if int(whose) != world:
                    raise UntraceableError(
                        self.graph.place, f"results that depend on {value} of other worlds"
                    )
            args = tuple(copies[arg] for arg in node.args)
            copies[index] = own.add(Node(node.op, args, value, node.kind))
        if len(own.nodes) > MAX_NODES:
            raise UntraceableError(self.graph.place, f"{len(own.nodes)} operations; at most {MAX_NODES}")
        inputs = tuple(str(node.value) for node in own.nodes if node.op == "input")
        return Function(inputs, tuple(own.nodes), tuple(copies[index] for index in outputs))


def memory_name(name: str) -> str:
    """Of a part of the memory in the program; fields and memory may have the same names."""
    return f"memory_{name}"
