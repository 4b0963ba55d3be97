"""Converts RunSpec to and from plain data. Unknown keys and wrong types are errors that name their path."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, Union, cast

import yaml

from rayagi.algorithms.registry import DEFINITIONS
from rayagi.config.errors import NO_VALUE, ConfigError
from rayagi.config.spec import RunSpec
from rayagi.config.yaml_text import parse_yaml


def run_spec_to_dict(spec: RunSpec) -> dict[str, Any]:
    """Nested plain data (dict, list, str, number, None); ``run_spec_from_dict`` is the inverse.

    The algorithm's settings are in a section with its name, ``ppo: {...}``.
    """
    data: dict[str, Any] = _plain(spec)
    return {spec.algorithm if key == "learning" else key: value for key, value in data.items()}


def run_spec_from_dict(data: Mapping[str, Any]) -> RunSpec:
    """A RunSpec from nested plain data; missing sections and fields get RunSpec's defaults.

    Whole numbers may be written as floats (``2e6``) and floats as whole numbers. Sections of other algorithms are
    validated, then ignored.

    Raises:
        ConfigError: an unknown key (the message has the nearest names), an unknown algorithm, or a value of the wrong type.
    """
    values = _values(run_spec_sections(), data, "")
    definition = DEFINITIONS[values.get("algorithm", next(iter(DEFINITIONS)))]
    sections = {name: values.pop(name) for name in DEFINITIONS if name in values}
    return RunSpec(**values, learning=sections.get(definition.name, definition.settings()))


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` updated with ``changes``, section by section; ``env.kwargs`` merges by key too."""
    result = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def with_settings(spec: RunSpec, settings: Iterable[str]) -> RunSpec:
    """``spec`` with ``key=value`` texts applied in order, as ``--set`` takes them.

    The key is a dotted path (``ppo.learning_rate``) or a field's name alone if one section, or the algorithm's,
    has it; the value is YAML (``1e-4``, ``[64, 64]``, ``null``, ``true``).

    A mapping updates a section but replaces a free mapping, so that ``env.kwargs={}`` can empty it.

    Raises:
        ConfigError: no ``=``, an unknown or ambiguous key, a value that is not YAML or has the wrong type, a setting of
            another algorithm, or another task or algorithm (their preset would differ).
    """
    data = run_spec_to_dict(spec)
    for setting in settings:
        key, separator, text = setting.partition("=")
        if not separator or not key.strip():
            raise ConfigError(setting, NO_VALUE, "is not key=value", "for example ppo.learning_rate=1e-4")
        path = setting_path(key.strip(), spec.algorithm)
        _refuse_unread(path, spec.algorithm)
        try:
            value = parse_yaml(text)
        except yaml.YAMLError as error:
            raise ConfigError(path, text, f"is not YAML ({' '.join(str(error).split())})") from error
        change: Any = value
        for part in reversed(path.split(".")):
            change = {part: change}
        replaces = isinstance(value, Mapping) and setting_paths().get(path) != "section"
        data = _replaced(data, path.split("."), value) if replaces else merged(data, change)
    changed = run_spec_from_dict(data)
    if changed.env.id != spec.env.id:
        raise ConfigError(
            "env.id",
            changed.env.id,
            f"cannot be set: the other settings are those of {spec.env.id}",
            f"name the task itself: rayagi train {changed.env.id}",
        )
    if changed.algorithm != spec.algorithm:
        raise ConfigError(
            "algorithm",
            changed.algorithm,
            f"cannot be set: the other settings are those of {spec.algorithm}",
            f"name it itself: rayagi train {spec.env.id} --algorithm {changed.algorithm}",
        )
    return changed


def setting_path(key: str, algorithm: str) -> str:
    """The dotted path of a ``--set`` key of a run of an algorithm.

    Raises:
        ConfigError: nothing has that name, or more than one section has.
    """
    paths = setting_paths()
    if key in paths or any(key.startswith(f"{path}.") for path, kind in paths.items() if kind == "mapping"):
        return key
    if "." not in key:
        matches = [path for path in paths if path.rpartition(".")[2] == key]
        own = [path for path in matches if path == f"{algorithm}.{key}"]
        if len(own or matches) == 1:
            return (own or matches)[0]
        if matches:
            raise ConfigError(
                key, NO_VALUE, "is a setting of several sections", f"write {' or '.join(matches)}"
            )
    # Of the algorithms' settings, only the run's own are worth a hint.
    readable = [
        path for path in paths if path.split(".")[0] not in DEFINITIONS or path.startswith(f"{algorithm}.")
    ]
    raise ConfigError(key, NO_VALUE, "no such setting", nearest(key, readable))


def _refuse_unread(path: str, algorithm: str) -> None:
    other = path.partition(".")[0]
    if other in DEFINITIONS and other != algorithm:
        own = path.replace(other, algorithm, 1)
        raise ConfigError(
            path,
            NO_VALUE,
            f"is a setting of {other}",
            f"write {own}" if own in setting_paths() else "leave it out",
        )


@cache
def run_spec_sections() -> dict[str, Any]:
    """Key of a configuration -> its type: RunSpec's fields, with one section per algorithm."""
    keys: dict[str, Any] = {}
    for name, wanted in _hints(RunSpec).items():
        if name == "learning":
            keys.update({each: definition.settings for each, definition in DEFINITIONS.items()})
        else:
            keys[name] = Literal[tuple(DEFINITIONS)] if name == "algorithm" else wanted
    return keys


@cache
def setting_paths() -> dict[str, Literal["value", "mapping", "section"]]:
    """Every setting's dotted path and whether it is a value, a free mapping, or a section of settings."""
    paths: dict[str, Literal["value", "mapping", "section"]] = {}

    def visit(keys: Mapping[str, Any], prefix: str) -> None:
        for name, wanted in keys.items():
            if is_dataclass(wanted):
                paths[prefix + name] = "section"
                visit(_hints(cast("type", wanted)), f"{prefix}{name}.")
            else:
                paths[prefix + name] = "mapping" if typing.get_origin(wanted) is Mapping else "value"

    visit(run_spec_sections(), "")
    return paths


def nearest(key: str, names: Iterable[str]) -> str:
    """A hint with the names nearest to ``key``, by full path or last part; else the first few names."""
    names = list(names)
    by_leaf = {name.rpartition(".")[2]: name for name in names}
    leaf = key.rpartition(".")[2]
    close = difflib.get_close_matches(key, names, n=3, cutoff=0.6)
    close += [by_leaf[match] for match in difflib.get_close_matches(leaf, by_leaf, n=3, cutoff=0.6)]
    if close:
        return f"did you mean {' or '.join(dict.fromkeys(close))}?"
    return f"there are {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"


@cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _replaced(data: Mapping[str, Any], parts: Sequence[str], value: Any) -> dict[str, Any]:
    head, *rest = parts
    return {**data, head: _replaced(data.get(head) or {}, rest, value) if rest else value}


def _values(hints: Mapping[str, Any], data: Any, path: str) -> dict[str, Any]:
    """The values of one section's keys, converted.

    Raises:
        ConfigError: not a mapping, an unknown key, or a value of the wrong type.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(
            path or "configuration", data, "must be a mapping of settings", f"with keys {', '.join(hints)}"
        )
    values: dict[str, Any] = {}
    for key, value in data.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in hints:
            prefix = f"{path}." if path else ""
            siblings = [prefix + name for name in hints]
            close = difflib.get_close_matches(where, siblings, n=3, cutoff=0.6)
            raise ConfigError(
                where, value, "no such setting", nearest(where, siblings if close else setting_paths())
            )
        wanted = hints[key]
        if is_dataclass(wanted):
            cls = cast("type", wanted)
            values[key] = cls(**_values(_hints(cls), value, where))
        else:
            values[key] = _convert(wanted, value, where)
    return values


def _convert(wanted: Any, value: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        inner = next((each for each in arguments if each is not type(None) and _fits(each, value)), None)
        return _refuse(wanted, value, path) if inner is None else _convert(inner, value, path)
    if not _fits(wanted, value):
        _refuse(wanted, value, path)
    if origin is tuple:
        return tuple(_convert(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is Mapping:
        return dict(value)
    if wanted is int:
        return int(value)
    if wanted is float:
        return float(value)
    return value


def _fits(wanted: Any, value: Any) -> bool:
    origin = typing.get_origin(wanted)
    number = isinstance(value, Real) and not isinstance(value, bool)
    if origin is Literal:
        return value in typing.get_args(wanted)
    if origin is tuple:
        return isinstance(value, list | tuple)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    if wanted is int:
        return number and (isinstance(value, Integral) or float(cast("Real", value)).is_integer())
    if wanted is float:
        return number
    return isinstance(value, wanted)


def _refuse(wanted: Any, value: Any, path: str) -> typing.NoReturn:
    members = typing.get_args(wanted)
    choices = [
        choice for part in (wanted, *members) for choice in typing.get_args(part) if isinstance(choice, str)
    ]
    close = difflib.get_close_matches(str(value), choices, n=1)
    only_choices = typing.get_origin(wanted) is Literal
    given = "" if only_choices or value is None else f", not {type(value).__name__}"
    offer = f"did you mean {close[0]!r}?" if close else ""
    raise ConfigError(path, value, f"must be {describe(wanted)}{given}", offer)


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def describe(wanted: Any) -> str:
    """A type annotation in words, for messages."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(repr(choice) for choice in arguments)
    if origin is tuple:
        return f"a list, each item {describe(arguments[0])}"
    if origin is Mapping:
        return "a mapping from names to values"
    if origin in (Union, types.UnionType):
        return " or ".join(describe(argument) for argument in arguments)
    return _NAMES.get(wanted, str(wanted))
