"""Converts RLlib values that a RunSpec represents differently. Only the driver imports this module."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig


def to_spec_value(name: str, value: Any) -> Any:
    """Convert a setting's value to that in a RunSpec."""
    if name == "grad_clip" and value is None:
        return 0.0
    if name == "evaluation_interval" and value is None:
        return 0
    if name == "vf_clip_param" and isinstance(value, float) and math.isinf(value):
        return None
    return value


def given_model_config(model_config: Mapping[str, Any] | DefaultModelConfig) -> dict[str, Any]:
    """Keys that the user set. For a DefaultModelConfig: sizes, activation, and values other than its defaults."""
    if isinstance(model_config, Mapping):
        return dict(model_config)
    defaults = dataclasses.asdict(DefaultModelConfig())
    always = ("fcnet_hiddens", "fcnet_activation")
    given = dataclasses.asdict(model_config)
    return {key: value for key, value in given.items() if key in always or value != defaults[key]}
