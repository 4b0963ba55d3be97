"""Tracer of simulators: each function is called once with symbolic expressions, which record a graph."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from placement.errors import counted
from rayagi.envs.errors import SimulatorError
from rayagi.envs.fused.expressions import Expr, ExprNode, Graph, Kind
from rayagi.envs.fused.simulator import Box, Discrete, Simulator, action_dim, named

MAX_NODES = 100_000
"""Largest traced function: C compilers take too long for larger ones."""


@dataclass(frozen=True, slots=True)
class Function:
    """A traced function: nodes in topological order, without those that no output needs.

    Attributes:
        inputs: names of the arguments, all reals, in the caller's order. Unused ones have no node
        nodes: inputs, constants and operations
        outputs: index of each output's node
    """

    inputs: tuple[str, ...]
    nodes: tuple[ExprNode, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Traced:
    """A simulator's three traced functions.

    Attributes:
        start: inputs ``draw0``, ...; outputs: the state's reals, in the order of ``Simulator.state``
        step: inputs: the state's names, then ``action0``, ... (clipped already; a choice as 0.0, 1.0, ...);
            outputs: the next state, reward, terminated (a truth value)
        observe: inputs: the state's names; outputs: the observation
    """

    simulator: Simulator
    start: Function
    step: Function
    observe: Function

    @property
    def obs_dim(self) -> int:
        """Number of reals of one observation."""
        return len(self.observe.outputs)


def trace(simulator: Simulator) -> Traced:
    """Trace a simulator's functions.

    Raises:
        SimulatorError: a function cannot be traced (for example it branches on a value), or has a wrong result. The message
            names the simulator, the function and, if known, the line.
    """
    check_declaration(simulator)
    names = tuple(simulator.state)
    reals = action_names(simulator)
    discrete = isinstance(simulator.actions, Discrete)

    def start(*draws: Expr) -> list[Any]:
        return list(_sized(simulator, "start", "state", simulator.start(draws), len(names)))

    def step(*given: Expr) -> list[Any]:
        state, actions = named(simulator, given[: len(names)]), given[len(names) :]
        outcome = simulator.step(state, actions[0] if discrete else tuple(actions))
        state, reward, terminated = _sized(simulator, "step", "(state, reward, terminated)", outcome, 3)
        return [*_sized(simulator, "step", "next state", state, len(names)), reward, terminated]

    def observe(*given: Expr) -> list[Any]:
        return list(
            _sized(simulator, "observe", "observation", simulator.observe(named(simulator, given)), None)
        )

    draws = tuple(f"draw{i}" for i in range(simulator.num_draws))
    return Traced(
        simulator,
        start=_traced(simulator, "start", start, draws),
        step=_traced(simulator, "step", step, (*names, *reals), truths=1),
        observe=_traced(simulator, "observe", observe, names),
    )


def trace_function(
    place: str, function: Callable[..., Sequence[Any]], inputs: Sequence[str], truths: int = 0
) -> Function:
    """Trace a function of reals. The last ``truths`` of its outputs are truth values, the others reals.

    Raises:
        SimulatorError: it cannot be traced, or an output has the wrong kind.
    """
    graph = Graph(place)
    given = [graph.input(name) for name in inputs]
    outputs = [graph.value(output) for output in function(*given)]
    for number, output in enumerate(outputs):
        kind: Kind = "real" if number < len(outputs) - truths else "truth"
        if output.node.kind != kind:
            raise graph.error(f"output {number} is a {output.node.kind} and should be a {kind}")
    if len(graph.nodes) > MAX_NODES:
        raise graph.error(f"it takes {len(graph.nodes)} operations; at most {MAX_NODES} can be compiled")
    return needed(graph, tuple(inputs), [output.index for output in outputs])


def action_names(simulator: Simulator) -> tuple[str, ...]:
    """Names of the reals of an action in programs."""
    return tuple(f"action{i}" for i in range(action_dim(simulator)))


def check_declaration(simulator: Simulator) -> None:
    """Raise SimulatorError if a simulator's declarations are invalid."""
    place = simulator.name
    names = getattr(simulator, "state", ())
    if isinstance(names, str) or not names or len(set(names)) != len(names):
        raise SimulatorError(place, f"state is {names!r}; it must be a tuple of different names")
    wrong = [name for name in names if not str(name).isidentifier() or str(name).startswith("_")]
    if wrong:
        raise SimulatorError(place, f"{wrong[0]!r} in state is not a valid public Python identifier")
    actions = getattr(simulator, "actions", None)
    if isinstance(actions, Discrete):
        if actions.count < 2:
            raise SimulatorError(place, f"actions are Discrete({actions.count}); there must be at least 2")
    elif not isinstance(actions, Box):
        raise SimulatorError(place, f"actions is {actions!r}; it must be Discrete(n) or Box(low, high)")
    elif not actions.low or len(actions.low) != len(actions.high) or not _ordered(actions):
        raise SimulatorError(
            place, f"{actions} is invalid: low and high must be tuples of one size, low below high"
        )
    if taken := set(names) & set(action_names(simulator)):
        raise SimulatorError(
            place, f"{min(taken)!r} in state is what step's action is called; choose another name"
        )
    draws = getattr(simulator, "num_draws", None)
    if not isinstance(draws, int) or draws < 0:
        raise SimulatorError(
            place, f"num_draws is {draws!r}; it must be the number of random numbers of start"
        )


def _ordered(box: Box) -> bool:
    return all(low < high for low, high in zip(box.low, box.high, strict=True))


def _traced(
    simulator: Simulator,
    name: str,
    function: Callable[..., list[Any]],
    inputs: tuple[str, ...],
    truths: int = 0,
) -> Function:
    place = f"{simulator.name}.{name}"
    try:
        return trace_function(place, function, inputs, truths)
    except SimulatorError:
        raise
    except Exception as error:  # any exception of the user's code
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise SimulatorError(
            f"{place}, {last.filename}:{last.lineno}", f"{type(error).__name__}: {error}"
        ) from error


def _sized(simulator: Simulator, function: str, what: str, given: Any, size: int | None) -> Sequence[Any]:
    place = f"{simulator.name}.{function}"
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise SimulatorError(
            place, f"it returns a {type(given).__name__}; it must return its {what} as a tuple"
        )
    if size is None and not given:
        raise SimulatorError(place, f"its {what} is empty")
    if size is not None and len(given) != size:
        raise SimulatorError(
            place, f"it returns {counted(len(given), 'value')} for its {what}, which has {size}"
        )
    return given


def needed(graph: Graph, inputs: tuple[str, ...], outputs: list[int]) -> Function:
    """Dead code elimination: the graph without nodes that no output needs."""
    live = set(_reached(graph, outputs))
    kept = [index for index in range(len(graph.nodes)) if index in live]
    number = {index: new for new, index in enumerate(kept)}
    nodes = tuple(
        ExprNode(node.op, tuple(number[arg] for arg in node.args), node.value, node.kind)
        for node in (graph.nodes[index] for index in kept)
    )
    return Function(inputs, nodes, tuple(number[index] for index in outputs))


def _reached(graph: Graph, outputs: list[int]) -> Iterator[int]:
    """Indices of the nodes from which outputs are computed."""
    stack, visited = list(outputs), set(outputs)
    while stack:
        index = stack.pop()
        yield index
        fresh = set(graph.nodes[index].args) - visited
        visited |= fresh
        stack += fresh
