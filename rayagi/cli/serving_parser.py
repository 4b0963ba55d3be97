"""Argument parsers of ``rayagi serve``, ``policy-server``, ``export-policy`` and ``export``."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from rayagi.cli.arguments import add_command, add_flag, add_trust, add_value, seed_argument
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

Spaces have the task's bounds, and Minari gets its specification too. For other formats, or other datasets than those of
`rayagi serve`, there is `rayagi replay export`, which knows no task: its spaces are as wide as the types of the columns.
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
    add_value(parser, "run", "RUN", "run folder")
    add_value(parser, "--checkpoint", "WHICH", "best (default), last, or a name", default="best")
    add_trust(parser)
    parser.add_argument(
        "--template",
        choices=("dp_only", "dp_mp", "mp_dp", "auto"),
        default="dp_only",
        help="which roles share a GMI (GMI-DRL, Figure 5); auto: predicted by the throughput model, decided by short runs",
    )
    add_value(parser, "--gmis", "N", "total number of GMIs (default: one per core or GPU)")
    add_value(parser, "--agents", "N", "GMIs with an agent, for mp_dp (default 1)")
    add_value(parser, "--num-envs", "N", "environments of each GMI (default: as in the run)")
    parser.add_argument("--backend", choices=get_args(Backend), help="how devices are shared")
    parser.add_argument(
        "--seed",
        type=seed_argument,
        metavar="N",
        help="seed of start states and exploration (default: the session's number)",
    )
    actions = parser.add_mutually_exclusive_group()
    add_flag(actions, "--greedy", "the policy's mode (default)")
    add_flag(actions, "--explore", "samples of the policy, as in training")
    limits = parser.add_argument_group("when to end")
    add_value(limits, "--steps", "N", "environment steps of all GMIs: 500k, 2M")
    add_value(limits, "--episodes", "N", "ended episodes of all GMIs")
    add_value(limits, "--time", "TIME", "time of serving: 90s, 5m")
    out = parser.add_argument_group("where it goes")
    add_value(out, "--out", "DIR", "folder of the dataset (default: nothing is written)")
    add_flag(out, "--append", "append to an existing dataset")
    out.add_argument("--format", choices=("parquet", "arrow"), help="file format (default parquet)")
    add_value(out, "--rows-per-file", "N", "maximum (default 1M)", default=1_000_000)
    add_value(out, "--file-size", "BYTES", "approximate limit (default 256MiB)", default=256 * 2**20)


def _add_policy_server(commands: Any) -> None:
    parser = add_command(
        commands, "policy-server", "serve a policy's actions to an external robot or game", _SERVER_EXAMPLES
    )
    add_value(parser, "run", "RUN", "run folder")
    add_value(parser, "--checkpoint", "WHICH", "best (default), last, or a name", default="best")
    add_trust(parser)
    add_flag(parser, "--follow", "use newer checkpoints as they are saved")
    where = parser.add_argument_group("addresses: at least one")
    where.add_argument("--port", type=_port, metavar="P", help="HTTP; 0: any free port, which is printed")
    where.add_argument(
        "--host", default="127.0.0.1", help="address for HTTP (default 127.0.0.1, this machine only)"
    )
    add_value(where, "--unix", "PATH", "local socket, for processes of this user")
    add_value(
        where,
        "--token-file",
        "FILE",
        "file whose first line is the bearer token of HTTP clients (default: none on this machine; with another "
        "--host one is created and printed)",
    )
    how = parser.add_argument_group("how it answers")
    add_value(how, "--max-rows", "N", "maximum observations per request (default 4096)", default=4096)
    add_value(how, "--threads", "N", "inference threads (default 1)", default=1)


def _add_export_policy(commands: Any) -> None:
    parser = add_command(
        commands,
        "export-policy",
        "write a policy as ONNX or for torch, to run without rayagi",
        _EXPORT_POLICY_EXAMPLES,
    )
    add_value(parser, "run", "RUN", "run folder")
    add_value(parser, "out", "OUT", "file to write: .onnx or .pt2")
    add_value(parser, "--checkpoint", "WHICH", "best (default), last, or a name", default="best")
    add_trust(parser)


def _add_export(commands: Any) -> None:
    parser = add_command(
        commands,
        "export",
        "write a dataset of `rayagi serve` for Minari or RLlib, with its task's spaces",
        _EXPORT_EXAMPLES,
    )
    add_value(parser, "dataset", "DATASET", "folder that `rayagi serve` wrote")
    parser.add_argument("--to", choices=("minari", "rllib"), required=True, help="which format")
    add_value(parser, "out", "OUT", "folder to write; must not exist")
    add_flag(
        parser,
        "--whole",
        "leave out episodes cut by the end of the recording (default: they count as truncated)",
    )


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"'{text}' is not a port: 0 to 65535")
    return int(text)
