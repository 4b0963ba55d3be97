"""What is derived from algorithms' definitions: settings, files, training, RLlib's classes."""

import dataclasses
import importlib
from pathlib import Path

import pytest

import rayagi
from rayagi.algorithms.appo import AppoSpec
from rayagi.algorithms.offline_learner import OfflineLearner
from rayagi.algorithms.ppo import PPOSpec
from rayagi.algorithms.registry import DEFINITIONS
from rayagi.algorithms.rollout_learner import MergedLearner
from rayagi.config.convert import run_spec_from_dict, run_spec_to_dict
from rayagi.config.errors import ConfigError
from rayagi.config.learning import LearningSpec
from rayagi.config.offline import OfflineSpec
from rayagi.config.presets import preset
from rayagi.config.rules import checked
from rayagi.config.spec import DataSpec, RunSpec
from tests.programs import run_python

EACH = pytest.mark.parametrize("definition", DEFINITIONS.values(), ids=DEFINITIONS)


@EACH
def test_settings_go_through_a_file_under_their_section(definition):
    spec = RunSpec(algorithm=definition.name, learning=LearningSpec(gamma=0.5))
    data = run_spec_to_dict(spec)
    assert set(data) & set(DEFINITIONS) == {definition.name}
    assert data[definition.name]["gamma"] == 0.5
    assert run_spec_from_dict(data) == spec
    assert type(spec.learning) is definition.settings


@EACH
def test_the_class_that_trains_is_there_and_takes_the_options(definition):
    for place in filter(None, (definition.learner, definition.captured_learner)):
        module, _, name = place.partition(":")
        base = OfflineLearner if issubclass(definition.settings, OfflineSpec) else MergedLearner
        assert issubclass(getattr(importlib.import_module(module), name), base)


@EACH
def test_a_preset_keeps_every_rule_and_the_usual_template(definition):
    spec = preset("HalfCheetah-v5", definition.name)
    if issubclass(definition.settings, OfflineSpec):
        spec = dataclasses.replace(spec, data=DataSpec(path="data/cheetah"))
    spec = checked(spec)
    assert (spec.gmi.template, spec.learning.target_kl) == (
        definition.templates[0],
        definition.preset.get("target_kl", 0.015),
    )


@EACH
def test_names_of_rllibs_face_are_fields_of_the_settings(definition):
    names = {field.name for field in dataclasses.fields(definition.settings)}
    assert set(definition.training_names.values()) <= names
    assert {definition.rllib.config, definition.rllib.algorithm} <= set(rayagi.__all__)


def test_files_of_before_which_hold_every_section_are_read():
    both = {"algorithm": "appo", "ppo": {"gamma": 0.9}, "appo": {"gamma": 0.8, "max_lag": 2}}
    assert run_spec_from_dict(both).learning == AppoSpec(gamma=0.8, max_lag=2)
    assert run_spec_from_dict({**both, "algorithm": "ppo"}).learning == PPOSpec(gamma=0.9)
    with pytest.raises(ConfigError, match=r"ppo\.gamma = 'much': must be a number"):
        run_spec_from_dict({**both, "ppo": {"gamma": "much"}})


def test_an_unknown_algorithm_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"algorithm = 'pp': must be one of 'ppo', .*did you mean 'ppo'"):
        run_spec_from_dict({"algorithm": "pp"})
    with pytest.raises(ConfigError, match="algorithm = 'sarsa': must be one of 'ppo'"):
        checked(RunSpec(algorithm="sarsa"))


def test_settings_of_another_algorithm_are_refused():
    with pytest.raises(ConfigError, match=r"'PPOSpec': are not the settings of .*'appo'; give a AppoSpec"):
        checked(RunSpec(algorithm="appo", learning=PPOSpec()))


def test_definitions_import_neither_torch_nor_ray():
    code = "import sys, rayagi.algorithms.registry; print(sorted({'ray', 'torch'} & set(sys.modules)))"
    done = run_python(code)
    assert done.stdout.strip() == "[]"


@EACH
def test_the_page_of_algorithms_has_a_row_for_each(definition):
    page = (Path(__file__).parents[3] / "docs" / "explanation" / "algorithms.md").read_text(encoding="utf-8")
    templates, face = ", ".join(definition.templates), definition.rllib
    row = f"| `{definition.name}` | {definition.summary} | {templates} | "
    assert f"{row}`{face.config}`, `{face.algorithm}` |" in page
