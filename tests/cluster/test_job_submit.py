"""Jobs, dashboard and metrics of a Ray head that requires a token, as a user of the cluster reaches them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.documents import PAGES, ROOT, blocks, path_with_tools, write_files

pytestmark = pytest.mark.cluster

TOKEN = "token-of-this-test-0123456789abcdef"
LIMIT_S = 150.0
HEAD = """
import functools, json, sys, tempfile
import ray

# Beside another Ray of this host, which may have the usual port of a node's agent, and whose head is what a job finds by
# default: ray.init has no argument for the port, and a head's own folder says which cluster is meant.
parameter = ray._private.parameter
parameter.RayParams = functools.partial(parameter.RayParams, dashboard_agent_listen_port=0)
with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
    context = ray.init(
        address="local", _temp_dir=folder, num_cpus=2, include_dashboard=True, dashboard_port=0,
        object_store_memory=150_000_000,
    )
    ray._private.utils.write_ray_address(context.address_info["gcs_address"], folder)  # as `ray start` does
    print(json.dumps({
        "gcs": context.address_info["gcs_address"], "dashboard": f"http://{context.dashboard_url}",
        "metrics": f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics", "folder": folder,
    }), flush=True)
    sys.stdin.read()
    ray.shutdown()
"""


def variables(home, **changes):
    """This process's variables in a home without a token, with this checkout's commands."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return kept | {"HOME": str(home), "PATH": path_with_tools(home), "PYTHONPATH": str(ROOT)} | changes


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def head(home):
    """Addresses of a head of its own, on free ports; it ends when its input does."""
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD],
        cwd=home,
        env=variables(home, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield json.loads(next(line for line in process.stdout if line.startswith("{")))
    finally:
        process.communicate("", timeout=60)


def status(url, token=None):
    """Status code and text of a page."""
    header = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=header), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def answer_with(url, text):
    """The page, once it has the text."""
    until = time.monotonic() + LIMIT_S
    while text not in (page := status(url)[1]):
        assert time.monotonic() < until, page[-3000:]
        threading.Event().wait(0.2)
    return page


def on_the_head(home, head, command, cwd):
    """A shell command with the head's address and token; its output.

    Again as long as the head's own agent has not come up, which Ray answers a job with "try again later".
    """
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_ADDRESS": head["gcs"]}
    until = time.monotonic() + LIMIT_S
    while True:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            capture_output=True,
            text=True,
            cwd=cwd,
            env=variables(home, **token),
            timeout=LIMIT_S,
            check=False,
        )
        if "No available agent" not in done.stderr or time.monotonic() > until:
            return done


def test_an_experiment_submitted_with_the_token_runs(home, head):
    """The working directory travels, and nothing has to be installed on the workers."""
    train = "experiments/train_ant.py --env InvertedPendulum-v5 --iterations 2 --gmis 1 --num-envs 4"
    question = "import os, rayagi; print('ORIGIN', rayagi.__file__); print('FOLDER', os.getcwd())"
    job = f'{sys.executable} {train} && {sys.executable} -c "{question}"'
    excludes = json.dumps({"excludes": ["runs", ".venv*", "docs", "tests", "*.png"]})
    options = ["--working-dir", str(ROOT), "--runtime-env-json", excludes]
    done = on_the_head(
        home, head, shlex.join(["ray", "job", "submit", *options, "--", "sh", "-c", job]), home
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "iteration 2: return" in done.stdout
    # The checkout that travelled is what ran, not an installation of it here.
    said = dict(re.findall(r"^(ORIGIN|FOLDER) (.*)$", done.stdout, re.MULTILINE))
    assert "working_dir_files" in said["FOLDER"]
    assert said["ORIGIN"] == str(Path(said["FOLDER"], "rayagi", "__init__.py"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("page", "place"),
    [
        pytest.param(page, place, id=f"{page.stem}-{place}")
        for page in PAGES
        for place, block in enumerate(blocks(page))
        if block.takes("head")
    ],
)
def test_a_documented_command_runs_on_the_head(home, head, tmp_path, page, place):
    """In the checkout, or in a folder with the page's files."""
    write_files(page, tmp_path)
    cwd = tmp_path if any(tmp_path.iterdir()) else ROOT
    for line in blocks(page)[place].shortened.replace("HEAD:6379", head["gcs"]).splitlines():
        done = on_the_head(home, head, line, cwd)
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


def test_prometheus_finds_and_scrapes_the_head_without_a_token(head):
    """Ray serves metrics to everybody who reaches the port; test_metrics_export.py reads a run's there."""
    assert "ray_node_cpu_count" in answer_with(head["metrics"], "ray_node_cpu_count")
    folder = Path(head["folder"])
    (targets,) = json.loads((folder / "prom_metrics_service_discovery.json").read_text())
    assert targets["labels"] == {"job": "ray"}
    assert str(folder) in (folder / "session_latest/metrics/prometheus/prometheus.yml").read_text()


def test_without_the_token_the_dashboard_refuses_and_a_command_says_what_to_set(home, head):
    for page in ("/api/jobs/", "/api/prometheus/sd"):
        url = head["dashboard"] + page
        assert [status(url)[0], status(url, "another")[0], status(url, TOKEN)[0]] == [401, 403, 200]
    assert status(head["dashboard"])[0] == 200  # the page itself, which asks for the token
    for token in ({}, {"RAY_AUTH_MODE": "token"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "another"}):
        done = subprocess.run(
            [sys.executable, "-m", "rayagi", "train", "InvertedPendulum-v5", "--gmis", "1"],
            capture_output=True,
            text=True,
            cwd=home,
            env=variables(home, RAY_ADDRESS=head["gcs"], **token),
            timeout=60,
            check=False,
        )
        assert done.returncode == 2
        first, *notes = done.stderr.splitlines()
        assert first == (
            f"rayagi: the Ray cluster at {head['gcs']} (from RAY_ADDRESS) requires its token: set RAY_AUTH_MODE=token, and "
            "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token to what `ray get-auth-token` prints on its head"
        )
        assert notes in ([], ["Nothing was computed yet, so no run folder is left."])
