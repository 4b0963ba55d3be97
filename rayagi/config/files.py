"""Configuration files: YAML with a RunSpec's keys, or Python that defines ``config``."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from rayagi.algorithms.registry import DEFINITIONS
from rayagi.config.convert import merged, run_spec_from_dict, run_spec_to_dict
from rayagi.config.errors import NO_VALUE, ConfigError
from rayagi.config.presets import preset
from rayagi.config.rules import checked
from rayagi.config.spec import RunSpec
from rayagi.config.trusted_modules import in_run_folder, refuse_modules_beside, refuse_untrusted_modules
from rayagi.config.yaml_text import parse_yaml

_YAML_SUFFIXES = (".yaml", ".yml")


def load_config_file(
    path: str | Path,
    env_id: str | None = None,
    algorithm: str | None = None,
    *,
    trust_modules: bool = False,
) -> RunSpec:
    """Read a run's configuration, checked.

    A YAML file holds any part of a RunSpec (``ppo: {learning_rate: 1e-4}``), which updates the preset of task and
    algorithm. A Python file defines ``config``: a RunSpec, a ``rayagi.PPOConfig`` (or another algorithm's), or a function
    without arguments that returns one.

    Args:
        path: a .yaml, .yml or .py file
        env_id: the task, if the file does not set it
        algorithm: the algorithm, if a YAML file does not set it; default ppo
        trust_modules: whether a YAML file may name code that may have come with it (rayagi.config.trusted_modules)

    Raises:
        ConfigError: no such file, another suffix, a file that raises (with its line), an unknown key, a wrong
            value, or a task or algorithm other than the requested one.
    """
    file = Path(path)
    if file.suffix not in (*_YAML_SUFFIXES, ".py"):
        raise ConfigError(str(path), NO_VALUE, "is no configuration file", "give a .yaml, .yml or .py file")
    try:
        source = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(str(path), NO_VALUE, "no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), NO_VALUE, f"cannot be read ({error})") from error
    python = file.suffix == ".py"
    if python:
        spec = _from_python(file, source, env_id)
    else:
        spec = _from_yaml(file, source, env_id, algorithm, trusted=trust_modules)
    for name, what, value, asked in (
        ("env.id", "task", spec.env.id, env_id),
        ("algorithm", "algorithm", spec.algorithm, algorithm),
    ):
        if asked not in (None, value):
            reason = f"is not the requested {what}, {asked!r}"
            raise ConfigError(f"{path}: {name}", value, reason, "give one of them only")
    return spec


def _from_yaml(
    file: Path, source: str, env_id: str | None, algorithm: str | None, *, trusted: bool
) -> RunSpec:
    try:
        data = parse_yaml(source)
    except yaml.YAMLError as error:
        raise ConfigError(str(file), NO_VALUE, f"is not YAML ({' '.join(str(error).split())})") from error
    data = {} if data is None else data
    try:
        given = run_spec_from_dict(data)  # reject non-mappings and unknown keys before anything else
        if not trusted:
            refuse = refuse_untrusted_modules if in_run_folder(file) else refuse_modules_beside
            refuse(given, file)
        if isinstance(data.get("env"), Mapping) and "id" in data["env"]:
            env_id = given.env.id
        elif env_id is None:
            raise ConfigError("env.id", NO_VALUE, "names no task", "give env.id, or `rayagi train TASK`")
        if "algorithm" in data:
            algorithm = given.algorithm
        _refuse_settings_of_others(data, algorithm or "ppo")
        base = preset(env_id, algorithm or "ppo")
        return checked(run_spec_from_dict(merged(run_spec_to_dict(base), data)))
    except ConfigError as error:
        raise error.at(f"{file}: {error.path}") from error


def _refuse_settings_of_others(data: Mapping[str, Any], algorithm: str) -> None:
    """A file that has settings, but none of the run's algorithm, forgot to name the algorithm.

    A run's own config.yaml may hold sections of every algorithm.

    Raises:
        ConfigError: the section, and whose it is.
    """
    others = [name for name in DEFINITIONS if name in data]
    if others and algorithm not in others:
        reason = f"holds settings of {others[0]}, and the run is one of {algorithm}"
        raise ConfigError(others[0], NO_VALUE, reason, f"add algorithm: {others[0]}, or rename the section")


def _from_python(file: Path, source: str, env_id: str | None) -> RunSpec:
    config = _defined_config(file, source)
    if callable(config):
        config = _guarded(file, config)
    return _guarded(file, lambda: _as_run_spec(file, config, env_id))


def _defined_config(file: Path, source: str) -> Any:
    module = ModuleType(f"rayagi_config_{file.stem}")
    module.__file__ = str(file)

    def run() -> None:
        exec(compile(source, str(file), "exec"), module.__dict__)

    # The file can import modules from its own folder, as a script can.
    sys.path.insert(0, str(file.resolve().parent))
    try:
        _guarded(file, run)
    finally:
        sys.path.remove(str(file.resolve().parent))
    if not hasattr(module, "config"):
        raise ConfigError(
            str(file), NO_VALUE, "does not define `config`", "set config = rayagi.PPOConfig()..."
        )
    return module.config


def _as_run_spec(file: Path, config: Any, env_id: str | None) -> RunSpec:
    if isinstance(config, RunSpec):
        return checked(config)
    # Recognise PPOConfig by its method: importing the class would import RLlib for every YAML file.
    if hasattr(config, "to_run_spec"):
        if config.env is None and env_id is not None:
            config = config.copy(copy_frozen=False).environment(env_id)
        spec = config.to_run_spec()
        config.refuse_algorithm_settings()
        assert isinstance(spec, RunSpec)
        return spec
    raise ConfigError(
        f"{file}: config",
        NO_VALUE,
        f"is a {type(config).__name__}",
        "make it a RunSpec, a rayagi.PPOConfig, or a function that returns one",
    )


def _guarded(file: Path, call: Any) -> Any:
    """``call()``; converts its exceptions to a ConfigError with the file's line."""
    try:
        return call()
    except ConfigError as error:
        if error.path.startswith(str(file)):
            raise
        raise error.at(f"{_place(file, error)}: {error.path}") from error
    except SyntaxError as error:
        raise ConfigError(f"{file}:{error.lineno}", NO_VALUE, f"is not Python ({error.msg})") from error
    except SystemExit as error:
        raise ConfigError(_place(file, error), NO_VALUE, f"exits (SystemExit {error.code})") from error
    except Exception as error:
        raise ConfigError(_place(file, error), NO_VALUE, f"raises {type(error).__name__}: {error}") from error


def _place(file: Path, error: BaseException) -> str:
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)
    ]
    return f"{file}:{lines[-1]}" if lines else str(file)
