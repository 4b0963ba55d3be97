"""``rayagi export``: writes a dataset of ``rayagi serve`` for RLlib or Minari."""

from __future__ import annotations

import argparse

from placement.errors import counted
from rayagi.cli.output import say
from rayagi.serving.dataset import open_dataset
from rayagi.serving.errors import DatasetError
from rayagi.serving.minari import export_minari
from rayagi.serving.rllib import export_rllib


def run(arguments: argparse.Namespace) -> int:
    """Export; returns the exit code."""
    dataset = open_dataset(arguments.dataset)
    if not dataset.files:
        raise DatasetError(
            str(arguments.dataset), "has no complete file to export; add to it with rayagi serve --append"
        )
    if arguments.to == "minari":
        episodes = export_minari(dataset, arguments.out, whole_only=arguments.whole)
        say(f"{arguments.out}: {counted(episodes, 'episode')} for Minari")
        say(f"\nNext:\n  python -c \"import minari; print(minari.MinariDataset('{arguments.out}/data'))\"")
    else:
        episodes = export_rllib(dataset, arguments.out, whole_only=arguments.whole)
        say(f"{arguments.out}: {counted(episodes, 'episode')} for RLlib")
        say(
            f"\nNext, in Python:\n  BCConfig().offline_data(**rayagi.serving.rllib.episode_settings('{arguments.out}'))"
        )
    return 0
