"""The state that a new run begins with, from the networks of another run: of an offline algorithm, say.

Networks, their targets, the temperature and the statistics of observations are taken over; optimisers and counters are new.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from actors.protocols import EnvInfo, StateDict
from rayagi.config.errors import NO_VALUE, ConfigError
from rayagi.config.off_policy import OffPolicySpec
from rayagi.config.offline import OfflineSpec
from rayagi.config.spec import RunSpec
from rayagi.models.actor_q import ActorQ
from rayagi.models.exploring_heads import DeterministicHead, StateSquashedGaussianHead
from rayagi.models.heads import SquashedGaussianHead
from rayagi.models.networks import Model
from rayagi.models.policy import NetworkPolicy, new_policy


def initial_state(
    run: str,
    theirs: NetworkPolicy,
    their_spec: RunSpec,
    shared: Mapping[str, Any],
    spec: RunSpec,
    info: EnvInfo,
) -> StateDict:
    """The shared state of a new run, given another one's policy, settings and checkpoint; ``run`` names it in errors.

    Raises:
        ConfigError: networks or normalisers do not fit.
    """
    _refuse_unfit(run, theirs, their_spec, spec, info)
    own = new_policy(spec, info, torch.device("cpu")).model
    learner = _networks(run, own, theirs, their_spec, shared["learner"], spec)
    own.load_state_dict(learner["model"])  # shapes were compared
    state: StateDict = {
        "iteration": 0,
        "env_steps": 0,
        "owed": 0.0,
        "learner": {**learner, "steps": _steps(their_spec, shared)},
    }
    if theirs.normaliser is not None:
        state["obs_normaliser"] = theirs.normaliser.state_dict()
    return state


def _refused(run: str, reason: str, instead: str) -> ConfigError:
    return ConfigError(f"--init {run}", NO_VALUE, reason, instead)


def _refuse_unfit(run: str, theirs: NetworkPolicy, their_spec: RunSpec, spec: RunSpec, info: EnvInfo) -> None:
    """Compare what does not depend on the kind of network."""
    if not isinstance(spec.learning, OffPolicySpec):
        reason = f"does not go with algorithm = {spec.algorithm!r}, which does not learn from a replay"
        raise _refused(run, reason, "use algorithm 'td3' or 'sac', or continue the run itself with --resume")
    before, now = theirs.info, info
    if (before.obs_dim, before.action.kind, before.action.low, before.action.high) != (
        now.obs_dim,
        now.action.kind,
        now.action.low,
        now.action.high,
    ):
        reason = f"is of {before.env_id}, whose observations or actions differ from {now.env_id}'s"
        raise _refused(run, reason, "begin with a run of the same task")
    for name in ("hidden", "activation"):
        here, there = getattr(spec.network, name), getattr(their_spec.network, name)
        if here != there:
            reason = f"has network.{name} = {there}, and this run {here}"
            raise _refused(run, reason, f"leave network.{name} out: it is then that of the run")
    section = spec.algorithm
    for name in ("normalize_obs", "obs_clip"):
        here, there = getattr(spec.learning, name), getattr(their_spec.learning, name)
        if here != there:
            reason = f"has {name} = {there}, and this run {here}: its networks would see other numbers"
            raise _refused(run, reason, f"use --set {section}.{name}={str(there).lower()}")
    if isinstance(their_spec.learning, OfflineSpec) and their_spec.learning.normalize_rewards:
        reason = "was trained on scaled rewards (normalize_rewards), so its critics are of another scale"
        raise _refused(run, reason, "train it with normalize_rewards = false")


def _steps(their_spec: RunSpec, shared: Mapping[str, Any]) -> int:
    """Gradient steps that the networks have had: at least 1, so that the policy acts from the first step."""
    learning = their_spec.learning
    offline = learning.num_updates * int(shared["iteration"]) if isinstance(learning, OfflineSpec) else 0
    return max(1, int(shared["learner"].get("steps", offline)))


def _networks(
    run: str,
    own: Model,
    theirs: NetworkPolicy,
    their_spec: RunSpec,
    learner: Mapping[str, Any],
    spec: RunSpec,
) -> StateDict:
    """``model``, and ``targets`` and ``log_alpha`` where the other run has them."""
    model = theirs.model
    if type(model) is type(own) and type(model.head) is type(own.head):
        _refuse_shapes(run, model, own, their_spec, spec)
        found = {name: learner[name] for name in ("targets", "log_alpha") if name in learner}
        state = dict(model.state_dict())
        if "head.uniform" in state:
            state["head.uniform"] = torch.zeros(())
        return {**found, "model": state}
    if not isinstance(own, ActorQ) or type(own.head) not in (DeterministicHead, StateSquashedGaussianHead):
        reason = (
            f"is of algorithm {their_spec.algorithm!r}, whose networks are not those of {spec.algorithm!r}"
        )
        raise _refused(run, reason, f"begin with a run of {spec.algorithm!r}")
    if type(model.head) is not SquashedGaussianHead:
        reason = f"is of algorithm {their_spec.algorithm!r}, whose policy is not one of {spec.algorithm!r}"
        instead = "begin with td3_bc for td3, or train bc or iql with --set network.head=squashed_gaussian"
        raise _refused(run, reason, instead)
    return _of_squashed_gaussian(run, own, model, learner, their_spec)


def _refuse_shapes(run: str, model: Model, own: Model, their_spec: RunSpec, spec: RunSpec) -> None:
    """Compare two models of one kind: tensors, and the support of distributional critics."""
    shapes = [{name: value.shape for name, value in each.state_dict().items()} for each in (model, own)]
    if shapes[0] != shapes[1] or getattr(model, "support", None) != getattr(own, "support", None):
        reason = f"has other networks than this run: settings of {their_spec.algorithm} differ"
        names = "num_atoms, v_min, v_max or layer_norm" if hasattr(own, "support") else "its options"
        raise _refused(run, reason, f"give {spec.algorithm} the same {names}")


def _of_squashed_gaussian(
    run: str, own: ActorQ, model: Model, learner: Mapping[str, Any], their_spec: RunSpec
) -> StateDict:
    """A policy of BC or IQL, which is the same function, and IQL's critics where their units are rectified linear."""
    head = model.head
    assert isinstance(head, SquashedGaussianHead)
    state = dict(own.state_dict())
    networks = {name: value.shape for name, value in state.items() if name.startswith("policy.")}
    policy = {name: value for name, value in model.state_dict().items() if name.startswith("policy.")}
    if isinstance(own.head, StateSquashedGaussianHead) and policy:
        # Outputs are means, then log standard deviations: those do not depend on the state at first.
        *_, weight, bias = policy
        policy[weight] = torch.cat((policy[weight], torch.zeros_like(policy[weight])))
        policy[bias] = torch.cat((policy[bias], head.log_std.detach()))
    if {name: value.shape for name, value in policy.items()} != networks:
        reason = "has a policy that is not a separate perceptron on all observations"
        raise _refused(run, reason, "begin with a run without network.shared, module and critic_only")
    state |= policy
    found: StateDict = {"model": state}
    if "critic" in learner and their_spec.network.activation == "relu":
        state |= {f"critics.{name}": value for name, value in _critics(own, learner["critic"]).items()}
        found["targets"] = {"critics": _critics(own, learner["target"])}
    return found


def _critics(own: ActorQ, saved: Mapping[str, Tensor]) -> StateDict:
    """IQL's critics, of the environment's actions, as critics of actions n in [-1, 1]: W (centre + scale n) + b."""
    layers, dim = len(own.critics.weights), own.head.centre.numel()
    found: StateDict = {}
    for layer in range(layers):
        names = [f"critics.{k}.{2 * layer}" for k in range(2)]  # an activation is between two linear layers
        weights = torch.stack([saved[f"{name}.weight"].T for name in names])
        biases = torch.stack([saved[f"{name}.bias"] for name in names]).unsqueeze(1)
        if layer == 0:
            of_actions = weights[:, -dim:]
            biases = biases + (own.head.centre @ of_actions).unsqueeze(1)
            weights = torch.cat((weights[:, :-dim], own.head.scale.unsqueeze(-1) * of_actions), 1)
        found[f"weights.{layer}"], found[f"biases.{layer}"] = weights, biases
    return found
