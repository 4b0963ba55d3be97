"""``rayagi envs``: list the available environments."""

from __future__ import annotations

import argparse

import gymnasium

from placement.text import aligned
from rayagi.envs import UnknownEnvironmentError, list_envs, named_env
from rayagi.envs.registry import PROVIDERS, nearest_ids


def run(arguments: argparse.Namespace) -> int:
    """Print the list; returns the exit code.

    Raises:
        UnknownEnvironmentError: nothing matches the pattern.
    """
    pattern = (arguments.pattern or "").lower()
    rows = [
        (
            listing.env_id,
            listing.engine,
            str(listing.obs_dim),
            listing.action,
            str(listing.max_episode_steps or "-"),
            listing.description,
        )
        for listing in (*list_envs(), *named_env(arguments.pattern or ""))
        if pattern in listing.env_id.lower()
    ]
    own = {row[0] for row in rows}
    others = sorted(name for name in gymnasium.registry if pattern in name.lower() and name not in own)
    unlisted = [
        definition.unlisted_ids
        for definition in PROVIDERS
        if definition.unlisted_ids
        and any(pattern.startswith(name) or name.startswith(pattern) for name in definition.engines)
    ]
    if pattern and not (rows or others or unlisted):
        raise UnknownEnvironmentError(arguments.pattern, nearest_ids(arguments.pattern))
    if rows:
        head = ("environment", "engine", "observation", "action", "time limit", "what it is")
        print("\n".join(aligned([head, *rows])))
    if pattern and others:
        print(f"\nthrough Gymnasium's own environments: {', '.join(others)}")
    elif not pattern:
        print(
            f"\nAny other Gymnasium id works too ({len(others)} installed): `rayagi envs PATTERN` finds them."
        )
    for text in unlisted:
        print(f"through another engine (docs/how-to/simulators.md): {text}")
    return 0
