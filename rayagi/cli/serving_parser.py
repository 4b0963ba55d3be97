"""Argument parsers of ``rayagi serve``, ``policy-server``, ``export-policy`` and ``export``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, get_args

from rayagi.cli.arguments import (
    add_command,
    add_trust,
    bytes_argument,
    count_argument,
    duration_argument,
    seed_argument,
)
from rayagi.config.spec import Backend

_SERVE_EXAMPLES = """\
examples:
  rayagi serve runs/NAME --out data/ant --steps 1M       a dataset of a million steps, as Parquet
  rayagi serve runs/NAME --out data/ant --episodes 500 --explore
  rayagi serve runs/NAME --out data/ant --append --checkpoint last --steps 1M
  rayagi serve runs/NAME --time 20s                      measure only: steps per second and latencies
  rayagi serve runs/NAME --template auto --out data/ant  the template that is fastest here

The folder of --out then holds data/ (what pyarrow.dataset, pandas or RLlib open), statistics.json, provenance.json and
manifest.jsonl. Files of data/ appear only when complete: after Ctrl-C, a killed GMI or a full disk they stay readable.
Without --steps, --episodes or --time it serves for a minute; the first limit reached ends it.
"""
_SERVER_EXAMPLES = """\
examples:
  rayagi policy-server runs/NAME --port 8000                    HTTP on this machine only
  rayagi policy-server runs/NAME --unix /tmp/ant.sock           local socket, for the lowest latency
  rayagi policy-server runs/NAME --port 8000 --host 0.0.0.0     for other hosts too: prints an access token
  rayagi policy-server runs/NAME --port 8000 --checkpoint last --follow    follow a run that is still training

ask it:
  curl -s localhost:8000/info
  curl -s localhost:8000/act -d '{"obs": [0.0, 0.0, 0.0, 0.0]}' -H 'Content-Type: application/json'
  python:  PolicyClient("http://localhost:8000").act(obs)      from rayagi.serving.client, needs numpy only

Concurrent requests share one inference. /stats has p50, p90, p99 and requests per second. SIGHUP reloads the checkpoint;
SIGTERM or Ctrl-C answers pending requests, then ends.
"""
_EXPORT_POLICY_EXAMPLES = """\
examples:
  rayagi export-policy runs/NAME ant.onnx         for ONNX Runtime, TensorRT or OpenVINO; needs `pip install 'rayagi[onnx]'`
  rayagi export-policy runs/NAME ant.pt2          for torch.export.load, in a Python that has torch and no rayagi

The file takes raw observations, any number of rows, and has the normalisation, the networks and the range of actions.
Its metadata `rayagi` (in .pt2 the extra file rayagi.json) is what the policy server's /info says. It is compared with
the policy before it is written.
"""
_EXPORT_EXAMPLES = """\
examples:
  rayagi export data/ant --to minari data/ant-minari      opened by minari.MinariDataset; needs `pip install minari`
  rayagi export data/ant --to rllib data/ant-rllib        whole episodes, for BC, MARWIL, CQL and IQL
"""


def add_serving(commands: Any) -> None:
    """Add the four commands."""
    _add_serve(commands)
    _add_policy_server(commands)
    _add_export_policy(commands)
    _add_export(commands)


def _add_serve(commands: Any) -> None:
    parser = add_command(
        commands, "serve", "run a trained policy at full speed and record its experience", _SERVE_EXAMPLES
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    _add_checkpoint(parser)
    add_trust(parser)
    parser.add_argument(
        "--template",
        choices=("dp_only", "dp_mp", "mp_dp", "auto"),
        default="dp_only",
        help="which roles share a GMI (GMI-DRL, Figure 5); auto: predicted by the throughput model, decided by short runs",
    )
    parser.add_argument(
        "--gmis", type=count_argument, metavar="N", help="total number of GMIs (default: one per core or GPU)"
    )
    parser.add_argument(
        "--agents", type=count_argument, metavar="N", help="GMIs with an agent, for mp_dp (default 1)"
    )
    parser.add_argument(
        "--num-envs",
        type=count_argument,
        metavar="N",
        help="environments of each GMI (default: as in the run)",
    )
    parser.add_argument("--backend", choices=get_args(Backend), help="how devices are shared")
    parser.add_argument(
        "--seed",
        type=seed_argument,
        metavar="N",
        help="seed of start states and exploration (default: the session's number)",
    )
    actions = parser.add_mutually_exclusive_group()
    actions.add_argument("--greedy", action="store_true", help="the policy's mode (default)")
    actions.add_argument("--explore", action="store_true", help="samples of the policy, as in training")
    limits = parser.add_argument_group("when to end")
    limits.add_argument(
        "--steps", type=count_argument, metavar="N", help="environment steps of all GMIs: 500k, 2M"
    )
    limits.add_argument("--episodes", type=count_argument, metavar="N", help="ended episodes of all GMIs")
    limits.add_argument("--time", type=duration_argument, metavar="TIME", help="time of serving: 90s, 5m")
    out = parser.add_argument_group("where it goes")
    out.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the dataset (default: nothing is written)"
    )
    out.add_argument("--append", action="store_true", help="append to an existing dataset")
    out.add_argument("--format", choices=("parquet", "arrow"), help="file format (default parquet)")
    out.add_argument(
        "--rows-per-file", type=count_argument, default=1_000_000, metavar="N", help="maximum (default 1M)"
    )
    out.add_argument(
        "--file-size",
        type=bytes_argument,
        default=256 * 2**20,
        metavar="BYTES",
        help="approximate limit (default 256MiB)",
    )


def _add_policy_server(commands: Any) -> None:
    parser = add_command(
        commands, "policy-server", "serve a policy's actions to an external robot or game", _SERVER_EXAMPLES
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    _add_checkpoint(parser)
    add_trust(parser)
    parser.add_argument("--follow", action="store_true", help="use newer checkpoints as they are saved")
    where = parser.add_argument_group("addresses: at least one")
    where.add_argument("--port", type=_port, metavar="P", help="HTTP; 0: any free port, which is printed")
    where.add_argument(
        "--host", default="127.0.0.1", help="address for HTTP (default 127.0.0.1, this machine only)"
    )
    where.add_argument("--unix", type=Path, metavar="PATH", help="local socket, for processes of this user")
    where.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file whose first line is the bearer token of HTTP clients (default: none on this machine; with another "
        "--host one is created and printed)",
    )
    how = parser.add_argument_group("how it answers")
    how.add_argument(
        "--max-rows",
        type=count_argument,
        default=4096,
        metavar="N",
        help="maximum observations per request (default 4096)",
    )
    how.add_argument(
        "--threads", type=count_argument, default=1, metavar="N", help="inference threads (default 1)"
    )


def _add_export_policy(commands: Any) -> None:
    parser = add_command(
        commands,
        "export-policy",
        "write a policy as ONNX or for torch, to run without rayagi",
        _EXPORT_POLICY_EXAMPLES,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="file to write: .onnx or .pt2")
    _add_checkpoint(parser)
    add_trust(parser)


def _add_export(commands: Any) -> None:
    parser = add_command(commands, "export", "convert a dataset for other tools", _EXPORT_EXAMPLES)
    parser.add_argument("dataset", type=Path, metavar="DATASET", help="folder that `rayagi serve` wrote")
    parser.add_argument("--to", choices=("minari", "rllib"), required=True, help="which format")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; must not exist")
    parser.add_argument(
        "--whole",
        action="store_true",
        help="leave out episodes cut by the end of the recording (default: they count as truncated)",
    )


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", default="best", metavar="WHICH", help="best (default), last, or a name"
    )


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"'{text}' is not a port: 0 to 65535")
    return int(text)
