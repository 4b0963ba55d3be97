"""A task's rules as functions of one world's reals: each is called once with expressions instead of tensors."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rayagi.envs.fused.expressions import Expr
from rayagi.envs.fused.trace import Function, needed
from rayagi.envs.tasks.compiled.tensors import RulesGraph, TracedTensor
from rayagi.envs.tasks.task import Memory, Rules, State


@dataclass(frozen=True, slots=True)
class Assignments:
    """What a rule makes of a world: ``targets[k]``, such as ``obs[3]``, becomes the function's output k."""

    function: Function
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TracedRules:
    """A task's functions. Inputs: ``qpos[0]``, ..., other fields, the memory's parts, actions and draws alike.

    Attributes:
        fields: sizes of the fields' rows by name, qpos and qvel included
        memory: shapes of the memory's parts by name, less the batch
        num_start_draws, num_step_draws: the task's
        control: actions and memory to ``controls`` and memory
        arrive: what followed to ``reward``, ``terminated``, memory and ``obs``
        observe: to ``obs`` alone, of a world that begins anew
        start: draws to qpos, qvel and memory
    """

    fields: Mapping[str, int]
    memory: Mapping[str, tuple[int, ...]]
    num_start_draws: int
    num_step_draws: int
    control: Assignments
    arrive: Assignments
    observe: Assignments
    start: Assignments


def trace_rules(rules: Rules[Any], fields: Mapping[str, int]) -> TracedRules:
    """Trace a task's rules.

    Args:
        fields: sizes of the fields' rows by name

    Raises:
        SimulatorError: a rule does something that cannot be traced.
    """
    task = rules.task
    begun = _Tracing(rules, fields, {})
    draws: Any = begun.graph.inputs("draws", task.num_start_draws)
    start = begun.rules.start(draws)
    memory = {name: tuple(value.shape[1:]) for name, value in start.memory.items()}
    started = begun.assignments({"qpos": start.qpos, "qvel": start.qvel}, start.memory)

    controlling = _Tracing(rules, fields, memory)
    controls, changed = controlling.rules.control(controlling.state)
    controlled = controlling.assignments({"controls": controls}, changed)

    arriving = _Tracing(rules, fields, memory)
    outcome = arriving.rules.outcome(arriving.state)
    arriving.state.memory |= outcome.memory
    results = {
        "reward": outcome.rewards,
        "terminated": outcome.terminated,
        "obs": arriving.rules.observe(arriving.state),
    }
    arrived = arriving.assignments(results, outcome.memory)

    observing = _Tracing(rules, fields, memory)
    observed = observing.assignments({"obs": observing.rules.observe(observing.state)}, {})
    return TracedRules(
        fields, memory, task.num_start_draws, task.num_step_draws, controlled, arrived, observed, started
    )


class _Tracing:
    """A graph, the rules bound to it, and the state of a world in it."""

    def __init__(
        self, rules: Rules[Any], fields: Mapping[str, int], memory: Mapping[str, tuple[int, ...]]
    ) -> None:
        task = rules.task
        self.graph = graph = RulesGraph(type(rules).__name__)
        self.rules = copy.copy(rules)
        for name, value in vars(rules).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(self.rules, name, graph.tensor(value.tolist()))
        parts: Any = {
            name: graph.inputs(memory_name(name), math.prod(shape)).reshape(1, *shape)
            for name, shape in memory.items()
        }
        rows: Any = {name: graph.inputs(name, size) for name, size in fields.items()}
        actions: Any = graph.inputs("actions", task.action_dim)
        draws: Any = graph.inputs("draws", task.num_step_draws)
        self.state = State(rows, parts, actions, draws)

    def assignments(self, results: Mapping[str, Any], memory: Memory) -> Assignments:
        """The results and the memory's parts as targets and their values."""
        named = {**results, **{memory_name(name): value for name, value in memory.items()}}
        targets: list[str] = []
        values: list[Expr] = []
        for name, tensor in named.items():
            assert isinstance(tensor, TracedTensor)
            flat = tensor.values.reshape(-1)
            targets += [f"{name}[{k}]" for k in range(len(flat))]
            values += [self.graph.value(value) for value in flat]
        inputs = tuple(str(node.value) for node in self.graph.nodes if node.op == "input")
        return Assignments(needed(self.graph, inputs, [value.index for value in values]), tuple(targets))


def memory_name(name: str) -> str:
    """Of a part of the memory in the program; fields and memory may have the same names."""
    return f"memory_{name}"
