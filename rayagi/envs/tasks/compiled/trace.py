"""Tracer of task functions: from torch tensors over worlds to scalar functions of one world.

Each function is called with symbolic tensors of a few worlds (``tensors.TracedTensor``). The expressions of every world must
be the same function of that world's inputs; this function is what gets compiled.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from rayagi.envs.fused.expressions import ExprNode
from rayagi.envs.fused.trace import MAX_NODES, Function
from rayagi.envs.tasks.compiled.expressions import TaskGraph
from rayagi.envs.tasks.compiled.tensors import TracedTensor, Tracing, UntraceableError, users_line
from rayagi.envs.tasks.task import Memory, State, TaskFunctions
from rayagi.envs.tasks.vec_env import stacked_terms

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Assignments:
    """A traced task function of one world, as assignments: ``targets[k]``, such as ``obs[3]``, = output k."""

    function: Function
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TracedTask:
    """The traced functions of a task. Inputs are named ``qpos[0]``, ...; likewise other fields, memory, actions and draws.

    Attributes:
        fields: values per world of each field, qpos and qvel included
        memory: shape per world of each memory tensor
        num_start_draws, num_step_draws: the task's
        control: actions and memory -> ``controls`` and memory
        after_physics: state reached -> ``reward``, ``terminated``, memory, ``terms`` and ``obs``
        observe: state -> ``obs`` alone, for a world that was reset
        start: draws -> qpos, qvel and memory
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
    """Trace a task's functions with 2 and with 3 worlds; equal results mean that N does not matter.

    Args:
        fields: the worlds' fields by name, (N, ...)

    Raises:
        UntraceableError: a function uses something that cannot be compiled; the message names it and its line.
    """
    few, more = (_traced(rules, fields, num_worlds) for num_worlds in (2, 3))
    if few != more:
        raise UntraceableError(type(rules).__name__, "results that depend on the number of worlds")
    return few


def _traced(rules: TaskFunctions[Any], fields: Mapping[str, Tensor], num_worlds: int) -> TracedTask:
    """Trace the four functions with this number of worlds."""
    task, given = rules.task, rules
    rules = copy.copy(given)  # detects attributes that the functions change
    shapes = {name: _shape_of_field(name, values) for name, values in fields.items()}

    # start: it also declares names and shapes of the memory.
    starting = _Tracing(rules, num_worlds)
    start = starting.call(rules.start, starting.inputs("draws", (task.num_start_draws,)))
    memory = {name: _shape_of_memory(name, value) for name, value in start.memory.items()}
    started = starting.assignments({"qpos": start.qpos, "qvel": start.qvel}, start.memory)

    controlling = _Tracing(rules, num_worlds)
    controls, changed = controlling.call(rules.control, controlling.state(shapes, memory))
    controlled = controlling.assignments({"controls": controls}, changed)

    # after_physics: reward_and_done, then observe with the memory that it returned.
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

    # observe alone: after a reset.
    observing = _Tracing(rules, num_worlds)
    obs = observing.call(rules.observe, observing.state(shapes, memory))
    observed = observing.assignments({"obs": obs}, {})

    kept = [name for name, value in vars(rules).items() if vars(given).get(name) is not value]
    if kept:
        reason = f"its functions change its attribute {kept[0]}; keep state in the memory instead"
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
    """An expression graph, and the symbolic arguments of a task function: each world has its own inputs."""

    def __init__(self, rules: TaskFunctions[Any], num_worlds: int) -> None:
        self.task, self.num_worlds = rules.task, num_worlds
        self.graph = TaskGraph(type(rules).__name__)
        self.mode = Tracing(self.graph)

    def inputs(self, name: str, shape: tuple[int, ...]) -> TracedTensor:
        """Symbolic inputs of every world, (num_worlds, *shape), named ``WORLD NAME[K]``."""
        size = math.prod(shape)
        names = [f"{world} {name}[{k}]" for world in range(self.num_worlds) for k in range(size)]
        return self.mode.inputs(names, (self.num_worlds, *shape))

    def state(self, fields: Mapping[str, tuple[int, ...]], memory: Mapping[str, tuple[int, ...]]) -> State:
        """A symbolic ``State``."""
        return State(
            {name: self.inputs(name, shape) for name, shape in fields.items()},
            {name: self.inputs(memory_name(name), shape) for name, shape in memory.items()},
            self.inputs("actions", (self.task.action_dim,)),
            self.inputs("draws", (self.task.num_step_draws,)),
        )

    def call(self, function: Callable[[Any], Result], given: Any) -> Result:
        """Call a task function; any exception on traced tensors makes it untraceable."""
        try:
            with torch.no_grad(), self.mode:
                return function(given)
        except UntraceableError:
            raise
        except Exception as error:
            raise UntraceableError(users_line(error), f"{type(error).__name__}: {error}") from error

    def assignments(self, results: Mapping[str, Tensor], memory: Memory) -> Assignments:
        """Results and memory as assignments of one world. All worlds must have the same function."""
        named = {**results, **{memory_name(name): value for name, value in memory.items()}}
        arrays = {name: self.mode.lifted(tensor).exprs for name, tensor in named.items()}
        rows = {name: values.reshape(self.num_worlds, -1) for name, values in arrays.items()}
        targets = tuple(f"{name}[{k}]" for name, row in rows.items() for k in range(row.shape[1]))
        flat = [
            [value.index for row in rows.values() for value in row[world]] for world in range(self.num_worlds)
        ]
        functions = [self._function_of(world, values) for world, values in enumerate(flat)]
        if any(function != functions[0] for function in functions):
            raise UntraceableError(self.graph.place, "results that depend on a world's index")
        return Assignments(functions[0], targets)

    def _function_of(self, world: int, outputs: Sequence[int]) -> Function:
        """The subgraph of one world's outputs, with the world's index removed from the inputs' names.

        Nodes are copied in depth-first postorder from the outputs, which is the same order for every world. So two worlds
        compute the same function exactly if their Functions are equal.
        """
        nodes, own = self.graph.nodes, TaskGraph(self.graph.place)
        copies: dict[int, int] = {}  # index in the shared graph -> index in this world's own
        stack = list(reversed(outputs))
        while stack:
            index = stack[-1]
            node = nodes[index]
            missing = [arg for arg in reversed(node.args) if arg not in copies]
            if missing:  # arguments first
                stack += missing
                continue
            stack.pop()
            value = node.value
            if node.op == "input":
                owner, _, value = str(value).partition(" ")
                if int(owner) != world:
                    raise UntraceableError(
                        self.graph.place, f"results that depend on {value} of other worlds"
                    )
            args = tuple(copies[arg] for arg in node.args)
            copies[index] = own.add(ExprNode(node.op, args, value, node.kind))
        if len(own.nodes) > MAX_NODES:
            raise UntraceableError(self.graph.place, f"{len(own.nodes)} operations; at most {MAX_NODES}")
        inputs = tuple(str(node.value) for node in own.nodes if node.op == "input")
        return Function(inputs, tuple(own.nodes), tuple(copies[index] for index in outputs))


def memory_name(name: str) -> str:
    """Name of a memory tensor in the program; the prefix avoids clashes with fields."""
    return f"memory_{name}"
