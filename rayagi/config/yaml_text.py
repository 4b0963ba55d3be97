"""YAML parser for settings: ``3e-4`` is a number, and duplicate keys are errors."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_FLOAT = re.compile(
    r"""^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
             |[0-9][0-9_]*[eE][-+]?[0-9]+
             |\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
             |\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
_INT = re.compile(
    r"""^[-+]?(?:0b[0-1_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$""",
)


class _Loader(yaml.SafeLoader):
    """SafeLoader without three YAML 1.1 rules: 3e-4 as text, 27:45 as 27 * 60 + 45, and the last of two equal keys wins."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._compared: set[int] = set()

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, AttributeError) as error:  # PyYAML's own, of 2001-99-99 or !!bool x
            kind = node.tag.removeprefix(_TAG)
            problem = f"{str(node.value)[:40]!r} is no {kind}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merges what ``<<`` names. Keys are compared before, once: a key that is merged may be given again."""
        if id(node) not in self._compared:
            self._compared.add(id(node))
            self._refuse_equal_keys(node)
        super().flatten_mapping(node)

    def _refuse_equal_keys(self, node: yaml.MappingNode) -> None:
        keys: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == f"{_TAG}merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is given twice", key_node.start_mark
                )
            keys.add(key if isinstance(key, Hashable) else repr(key))


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (f"{_TAG}float", f"{_TAG}int")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+0123456789."))
_Loader.add_implicit_resolver(f"{_TAG}int", _INT, list("-+0123456789"))


def parse_yaml(text: str) -> Any:
    """Parse a YAML text.

    Raises:
        yaml.YAMLError: invalid YAML, or a duplicate key; the message has line and column.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error
