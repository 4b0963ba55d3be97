"""An experiment file runs as a Ray job: the working directory travels, nothing has to be installed on the workers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.cluster
def test_an_experiment_submitted_as_a_job_succeeds(tmp_path):
    """A head node of its own, on free ports, in a process group that only this test ends."""
    driver = tmp_path / "submit.py"
    driver.write_text(
        """
import functools, sys, tempfile, time
import ray
from ray.job_submission import JobStatus, JobSubmissionClient

# Beside another Ray of this host, which may have the usual port of a node's agent, and whose head is what a job finds by
# default: ray.init has no argument for the port, and a head's own folder says which cluster is meant.
parameter = ray._private.parameter
parameter.RayParams = functools.partial(parameter.RayParams, dashboard_agent_listen_port=0)
folder = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")
context = ray.init(
    address="local", _temp_dir=folder.name, num_cpus=2, include_dashboard=True, dashboard_port=0,
    object_store_memory=150_000_000,
)
ray._private.utils.write_ray_address(context.address_info["gcs_address"], folder.name)  # as `ray start` does
client = JobSubmissionClient(f"http://{context.dashboard_url}")
runtime_env = {"working_dir": sys.argv[1], "excludes": ["runs", ".venv*", "docs", "tests", "*.png"]}
until = time.monotonic() + 150

def submitted(entrypoint):
    # Again as long as the head's own agent has not come up, which Ray answers with "try again later".
    while True:
        try:
            return client.submit_job(entrypoint=entrypoint, runtime_env=runtime_env)
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.5)

def ended(job):
    while not client.get_job_status(job).is_terminal() and time.monotonic() < until:
        time.sleep(0.5)
    return client.get_job_logs(job)

job = submitted(
    f"{sys.executable} experiments/train_ant.py --env InvertedPendulum-v5 --iterations 2 --gmis 1 --num-envs 4"
)
print(ended(job))
print("STATUS", client.get_job_status(job).value)
question = 'import os, rayagi; print("ORIGIN", rayagi.__file__); print("FOLDER", os.getcwd())'
print(ended(submitted(f"{sys.executable} -c '{question}'")))
ray.shutdown()
folder.cleanup()
"""
    )
    environment = {
        key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "RAY_JOB_ID")
    }
    done = subprocess.run(
        [sys.executable, str(driver), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert "STATUS SUCCEEDED" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert "iteration 2: return" in done.stdout
    # The checkout that travelled is what ran, not an installation of it here.
    said = dict(
        line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("ORIGIN", "FOLDER"))
    )
    assert "working_dir_files" in said["FOLDER"]
    assert said["ORIGIN"] == str(Path(said["FOLDER"], "rayagi", "__init__.py"))
