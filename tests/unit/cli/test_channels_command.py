"""`rayagi channels`: live channels are found, described and dumped without Ray."""

import json
import subprocess
import sys
import time

import pyarrow as pa
import pytest
import torch

from collectives.experience.consumer_endpoint import ConsumerEndpoint
from collectives.experience.producer_ring import ProducerRing
from collectives.experience.schema import ExperienceSchema, Field
from rayagi.cli import main

SCHEMA = ExperienceSchema(
    "command", (Field(name="obs", shape=(4, 3)), Field(name="done", dtype=torch.bool, shape=(4,)))
)


@pytest.fixture
def channel():
    ring, consumer_endpoint = ProducerRing(SCHEMA, rows=2, slots=3, producer=1), ConsumerEndpoint(SCHEMA)
    ring.attach(consumer_endpoint.endpoint)
    assert consumer_endpoint.producers == (1,)
    rows = {"obs": torch.arange(24.0).reshape(2, 4, 3), "done": torch.tensor([[True, False] * 2] * 2)}
    ring.put(rows, version=4)
    ring.put(rows, version=6)
    yield ring, consumer_endpoint
    ring.close()
    consumer_endpoint.close()


def test_a_table_says_what_travels_and_who_holds_it(channel, capsys):
    batch = channel[1].take(1.0)
    assert main(["channels", "--every", "0.01"]) == 0
    text = capsys.readouterr().out
    assert "channel command: obs: float32[4, 3], done: bool[4]; 52 bytes a row" in text
    own = text[text.index("channel command:") :]  # this machine may have channels of others
    line = next(line for line in own.splitlines() if line.split()[0] == "1")
    assert line.split()[2:8] == ["2", "0.0", "0.0", "6", "2/3", "0%"]
    assert ": 2 (1 taken), lag 2" in line
    batch.release()


def test_json_has_all_numbers_with_their_units(channel, capsys):
    assert main(["channels", "--json", "--every", "0.01"]) == 0
    (found,) = [one for one in json.loads(capsys.readouterr().out) if one["channel"] == "command"]
    assert (found["producer"], found["committed"], found["committed_rows"], found["slots"]) == (1, 2, 4, 3)
    assert (found["row_bytes"], found["committed_bytes"]) == (52, 208)
    assert found["fields"] == ["obs: float32[4, 3]", "done: bool[4]"]
    assert [consumer["backlog"] for consumer in found["consumers"]] == [2]
    assert found["bytes_per_s"] == found["blocked_share"] == 0.0


def test_a_dump_is_opened_by_pyarrow(channel, tmp_path, capsys):
    out = tmp_path / "out.arrow"
    assert main(["channels", "dump", "command", str(out)]) == 0
    assert "Batch 2 of producer 1, version 6: 2 rows" in capsys.readouterr().out
    table = pa.ipc.open_file(out).read_all()
    assert table.schema.metadata[b"rayagi.version"] == b"6"
    assert (
        table["obs"].combine_chunks().to_numpy_ndarray().tolist()
        == torch.arange(24.0).reshape(2, 4, 3).tolist()
    )
    assert table["done"].combine_chunks().to_numpy_ndarray().tolist() == [[1, 0, 1, 0]] * 2


def test_a_dump_waits_for_the_producer_that_fills_its_only_slot(tmp_path, monkeypatch):
    """As the collectors of a synchronous run do for most of an iteration."""
    ring, consumer_endpoint = ProducerRing(SCHEMA, rows=2, slots=1), ConsumerEndpoint(SCHEMA)
    ring.attach(consumer_endpoint.endpoint)
    assert consumer_endpoint.producers == (0,)
    filled = ring.reserve()
    monkeypatch.setattr(time, "sleep", lambda _: filled.commit(version=3))  # once it has looked in vain
    out = tmp_path / "out.arrow"
    try:
        assert main(["channels", "dump", "command", str(out)]) == 0
    finally:
        ring.close()
        consumer_endpoint.close()
    assert pa.ipc.open_file(out).read_all().schema.metadata[b"rayagi.version"] == b"3"


def test_what_cannot_be_dumped_is_said_in_one_line(channel, tmp_path, capsys):
    assert main(["channels", "dump", "nothing", str(tmp_path / "out.arrow")]) == 2
    assert "channel 'nothing': there is none: live channels of yours are" in capsys.readouterr().err
    assert main(["channels", "dump", "command", str(tmp_path / "no" / "out.arrow")]) == 1
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.usefixtures("default_signals")
def test_watching_ends_with_ctrl_c_or_with_its_reader(channel):
    command = [sys.executable, "-m", "rayagi", "channels", "--watch", "--json", "--every", "0.05"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        looks = [json.loads(process.stdout.readline()) for _ in range(2)]
        assert all("command" in {one["channel"] for one in look} for look in looks)
        process.send_signal(2)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, errors) == (0, "")
