"""A fake of rayagi.coordinator's Session that computes nothing, checks its caller and has its own clock."""

from __future__ import annotations

import torch

from actors.protocols import EvaluationResult, IterationResult

STEPS = 64
"""Environment steps of one iteration."""


class FakeClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class FakeSession:
    """Iteration i has one episode with return i; evaluation returns ten times that."""

    def __init__(self, clock=None, *, iteration_s=0.1, events=None):
        self.clock = clock or FakeClock()
        self.iteration_s = iteration_s
        self.iteration = 0
        self.in_flight = None
        self.requests = []
        self.evaluated_at = []
        self.evaluation_seeds = []
        self.evaluate_value = lambda iteration: 10.0 * iteration
        self.weights = torch.zeros(3)
        self.histograms = {}
        """Of an iteration."""
        self.events = events or {}
        """What happens instead of an iteration: an exception, or metrics that replace the usual ones."""

    def submit(self, num_iterations):
        assert self.in_flight is None, "a request is in flight already"
        assert num_iterations >= 1
        self.requests.append(num_iterations)
        self.in_flight = num_iterations

    def collect(self):
        assert self.in_flight is not None, "nothing was submitted"
        results = [self._iterate() for _ in range(self.in_flight)]
        self.in_flight = None
        return results

    def _iterate(self):
        self.iteration += 1
        self.clock.now += self.iteration_s
        self.weights += 1.0
        metrics = {
            "env_steps": float(STEPS),
            "episodes": 1.0,
            "iteration_s": self.iteration_s,
            "simulate_s": 0.5 * self.iteration_s,
            "act_s": 0.1 * self.iteration_s,
            "update_s": 0.2 * self.iteration_s,
            "sync_s": 0.1 * self.iteration_s,
            "policy_loss": -0.01,
            "value_loss": 0.5,
            "resident_bytes": 2.0**28,
        }
        event = self.events.get(self.iteration)
        if isinstance(event, BaseException):
            raise event
        if callable(event):
            event()
        elif event is not None:
            metrics |= event
        return IterationResult(
            iteration=self.iteration,
            metrics=metrics,
            episode_returns=[float(self.iteration)],
            episode_lengths=[20],
            reward_terms={"up": [2.0 * self.iteration]},
            histograms=self.histograms.get(self.iteration, {}),
        )

    def evaluate(self, num_episodes, *, seed):
        assert self.in_flight is None, "evaluated while iterations were in flight"
        self.evaluated_at.append(self.iteration)
        self.evaluation_seeds.append(seed)
        value = self.evaluate_value(self.iteration)
        return EvaluationResult([value] * num_episodes, [20] * num_episodes)

    def state_dict(self):
        assert self.in_flight is None, "saved while iterations were in flight"
        shared = {"iteration": self.iteration, "learner": {"weights": self.weights.clone()}}
        return {"shared": shared, "local": [{"iteration": self.iteration}], "num_gmis": 1}

    def save_replays(self, folder):
        return {}

    def load_state_dict(self, state):
        self.iteration = state["shared"]["iteration"]
        self.weights = state["shared"]["learner"]["weights"].clone()
        if "local" in state:
            assert state["local"][0]["iteration"] == self.iteration
