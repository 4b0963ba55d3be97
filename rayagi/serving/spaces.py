"""Gymnasium spaces of a dataset, for exports."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from rayagi.serving.column_layout import ColumnLayout


def spaces_of(layout: ColumnLayout) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
    """Observation space and action space of the columns."""
    obs = gymnasium.spaces.Box(-np.inf, np.inf, (layout.obs_dim,), np.float32)
    action = layout.action
    if action.kind == "discrete":
        return obs, gymnasium.spaces.Discrete(action.num_choices)
    if action.kind == "multi_discrete":
        return obs, gymnasium.spaces.MultiDiscrete(list(action.choices))
    low, high = np.array(action.low, dtype=np.float32), np.array(action.high, dtype=np.float32)
    return obs, gymnasium.spaces.Box(low, high, dtype=np.float32)
