"""A loop in the manner of PureJaxRL: simulation, inference, sampling and PPO's update of many iterations in one jit.

Our own code, with rayagi's network, losses and sizes (``rayagi.algorithms.ppo``). As PureJaxRL does (Lu et al., Discovered
Policy Optimisation, 2022), a time limit counts as an end, and minibatches are drawn anew from all samples every epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.fusion.settings import Settings
from experiments.fusion.variants.jax_world import JaxWorld

Tree = Any


class Samples(NamedTuple):
    """Steps of all environments, time first."""

    obs: jax.Array
    actions: jax.Array
    log_probs: jax.Array
    values: jax.Array
    rewards: jax.Array
    done: jax.Array


def network(key: jax.Array, sizes: tuple[int, ...], last_gain: float) -> Tree:
    """Orthogonal weights (gain sqrt 2, ``last_gain`` for the last layer), zero biases."""
    gains = [2.0**0.5] * (len(sizes) - 2) + [last_gain]
    keys = jax.random.split(key, len(gains))
    return [
        (jax.nn.initializers.orthogonal(gain)(one, (fan_in, fan_out)), jnp.zeros(fan_out))
        for one, gain, fan_in, fan_out in zip(keys, gains, sizes[:-1], sizes[1:], strict=True)
    ]


def forward(layers: Tree, x: jax.Array) -> jax.Array:
    """Tanh between layers."""
    for weight, bias in layers[:-1]:
        x = jnp.tanh(x @ weight + bias)
    weight, bias = layers[-1]
    return x @ weight + bias


def log_prob_of(logits: jax.Array, actions: jax.Array) -> jax.Array:
    """Log softmax at the chosen index."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), actions[..., None], axis=-1)[..., 0]


def advantages_of(samples: Samples, last_value: jax.Array, settings: Settings) -> jax.Array:
    """Generalised advantage estimation, backwards through time."""

    def back(
        carry: tuple[jax.Array, jax.Array], row: Samples
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        running, next_value = carry
        delta = row.rewards + settings.gamma * next_value * (1 - row.done) - row.values
        running = delta + settings.gamma * settings.gae_lambda * (1 - row.done) * running
        return (running, row.values), running

    start = (jnp.zeros_like(last_value), last_value)
    return jax.lax.scan(back, start, samples, reverse=True)[1]


def loss_of(model: Tree, batch: tuple[Samples, jax.Array, jax.Array], settings: Settings) -> jax.Array:
    """PPO's clipped loss, the squared error of the values and the entropy."""
    samples, advantages, targets = batch
    logits = forward(model["policy"], samples.obs)
    log_ratio = log_prob_of(logits, samples.actions) - samples.log_probs
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - settings.clip_ratio, 1 + settings.clip_ratio)
    policy_loss = -jnp.minimum(ratio * advantages, clipped * advantages).mean()
    value_loss = jnp.square(forward(model["value"], samples.obs)[..., 0] - targets).mean()
    log_p = jax.nn.log_softmax(logits)
    entropy = -(jnp.exp(log_p) * log_p).sum(-1).mean()
    return policy_loss + settings.value_coef * value_loss - settings.entropy_coef * entropy


def adam(
    gradients: Tree, moments: Tree, model: Tree, count: jax.Array, settings: Settings
) -> tuple[Tree, Tree]:
    """One step of Adam on clipped gradients (Kingma & Ba 2015, algorithm 1). Returns moments and model."""
    norm = jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(gradients)))
    scale = jnp.minimum(settings.max_grad_norm / (norm + 1e-6), 1.0)
    gradients = jax.tree.map(lambda g: g * scale, gradients)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradients)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * jnp.square(g), moments[1], gradients)
    step = settings.learning_rate * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    eps = settings.adam_eps * jnp.sqrt(1 - 0.999**count)
    model = jax.tree.map(lambda p, m, v: p - step * m / (jnp.sqrt(v) + eps), model, first, second)
    return (first, second), model


def make_training(
    world: JaxWorld, settings: Settings, iterations: int
) -> tuple[Callable[[], Tree], Callable[[Tree], Any]]:
    """A function that makes the start, and a compiled one that trains ``iterations`` from it.

    The latter returns what to go on from, and per iteration: mean reward, episodes that ended.
    """

    def start() -> Tree:
        keys = jax.random.split(jax.random.key(settings.seed), 3)
        sizes = (world.obs_dim, *settings.hidden)
        model = {
            "policy": network(keys[0], (*sizes, world.num_choices), 0.01),
            "value": network(keys[1], (*sizes, 1), 1.0),
        }
        # Apart, since both are given away to what trains.
        moments = jax.tree.map(jnp.zeros_like, model), jax.tree.map(jnp.zeros_like, model)
        return model, moments, jnp.zeros(()), world.start(settings.num_envs), keys[2]

    def collect(model: Tree, worlds: Tree, key: jax.Array) -> tuple[Tree, Samples]:
        def one(worlds: Tree, key: jax.Array) -> tuple[Tree, Samples]:
            obs = world.observe(worlds)
            logits = forward(model["policy"], obs)
            actions = jax.random.categorical(key, logits)
            after, rewards, done = world.step(worlds, actions)
            value = forward(model["value"], obs)[..., 0]
            return after, Samples(
                obs, actions, log_prob_of(logits, actions), value, rewards, done.astype(float)
            )

        return jax.lax.scan(one, worlds, jax.random.split(key, settings.rollout_length))

    def epoch(carry: Tree, key: jax.Array) -> tuple[Tree, None]:
        model, moments, count, batch = carry
        size = settings.num_envs * settings.rollout_length
        order = jax.random.permutation(key, size).reshape(settings.num_minibatches, -1)

        def step(carry: Tree, indices: jax.Array) -> tuple[Tree, None]:
            model, moments, count = carry
            part = jax.tree.map(lambda leaf: leaf[indices], batch)
            gradients = jax.grad(loss_of)(model, part, settings)
            count = count + 1
            moments, model = adam(gradients, moments, model, count, settings)
            return (model, moments, count), None

        model, moments, count = jax.lax.scan(step, (model, moments, count), order)[0]
        return (model, moments, count, batch), None

    def iteration(carry: Tree, _: None) -> tuple[Tree, tuple[jax.Array, jax.Array]]:
        model, moments, count, worlds, key = carry
        key, collecting, learning = jax.random.split(key, 3)
        worlds, samples = collect(model, worlds, collecting)
        last_value = forward(model["value"], world.observe(worlds))[..., 0]
        advantages = advantages_of(samples, last_value, settings)
        targets = advantages + samples.values
        normal = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        batch = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), (samples, normal, targets))
        keys = jax.random.split(learning, settings.num_epochs)
        model, moments, count, _ = jax.lax.scan(epoch, (model, moments, count, batch), keys)[0]
        return (model, moments, count, worlds, key), (samples.rewards.mean(), samples.done.sum())

    def train(carry: Tree) -> Any:
        return jax.lax.scan(iteration, carry, None, length=iterations)

    return start, jax.jit(train, donate_argnums=0)
