"""Numbers left to a search, through RLlib's face: what a search had found is what runs, and what a checkpoint keeps."""

from __future__ import annotations

import pytest

from placement.inventory import local_machine
from rayagi import PPOConfig
from rayagi.coordinator.search_store import SearchStore
from rayagi.coordinator.searching import SearchSettings

pytestmark = pytest.mark.cluster


@pytest.mark.slow
def test_an_algorithm_runs_what_a_search_had_found(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = PPOConfig().environment("CartPole-v1").gmi(num_gmis="auto", num_envs="auto")
    store = SearchStore(config.to_run_spec(), local_machine())
    store.save_note(SearchSettings().name(), {"gmis": 1, "num_envs": 8, "complete": True})
    algo = config.build_algo()
    try:
        assert (algo.run_spec.gmi.num_gmis, algo.run_spec.gmi.num_envs) == (1, 8)
        algo.train()
        (state,), _ = algo.get_ctor_args_and_kwargs()
    finally:
        algo.stop()
    kept = PPOConfig.from_state(state).to_run_spec().gmi
    assert (kept.num_gmis, kept.gmis_per_gpu, kept.num_envs) == (1, None, 8)
