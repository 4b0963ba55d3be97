"""The real server at a port and a socket of this machine, with well-behaved and other clients."""

import asyncio
import errno
import json
import math
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from saved_runs import save, saved_run

from actors.protocols import ObsLeaf
from actors.roles import Agent
from rayagi.config.convert import run_spec_from_dict
from rayagi.run.folder import open_run
from rayagi.serving.client import PolicyClient, PolicyRefusedError, PolicyUnreachableError, decoded_answers
from rayagi.serving.errors import ListenError
from rayagi.serving.latency import Latencies
from rayagi.serving.policy_server import server as server_module
from rayagi.serving.policy_server import socket_frontend
from rayagi.serving.policy_server.frames import HEADER, Kind, frame, header
from rayagi.serving.policy_server.requests import Expected, encoded
from rayagi.serving.policy_server.served_policy import GreedyPolicy, ServedPolicy
from rayagi.serving.policy_server.server import PolicyServer, ServerSettings, is_loopback
from rayagi.serving.source import saved_policy
from tests.programs import run_python
from tests.waiting import until


@contextmanager
def serving(run, *, which="best", **settings):
    """A server in a thread; yields it, its URL and its messages."""
    messages, started, running = [], threading.Event(), {}

    async def main():
        server = PolicyServer(ServedPolicy(run, which), ServerSettings(**settings), messages.append)
        running.update(server=server, loop=asyncio.get_running_loop())
        task = asyncio.create_task(server.run(signals=False))
        ready = asyncio.create_task(server.ready.wait())
        await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
        started.set()
        ready.cancel()
        await task

    threads = torch.get_num_threads()
    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert started.wait(60)
    server = running["server"]
    try:
        yield server, f"http://127.0.0.1:{server.port}", messages
    finally:
        with suppress(RuntimeError):  # it has ended already
            running["loop"].call_soon_threadsafe(server.stop)
        thread.join(30)
        assert not thread.is_alive()
        torch.set_num_threads(threads)


def asked(url, body=None, content_type="application/json", **headers):
    """Status and body of a request."""
    kind = {"Content-Type": content_type} if body is not None else {}
    request = urllib.request.Request(url, data=body, headers={**kind, **headers})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def expected_actions(run, obs, which="best"):
    """By the policy itself: its mode, within the range."""
    saved = saved_policy(run, which)
    with torch.inference_mode():
        outputs = saved.policy.outputs(saved.policy.observe(torch.as_tensor(obs)))
    return saved.policy.mode(outputs).clamp(-3.0, 3.0).numpy()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return saved_run(tmp_path_factory.mktemp("runs"), iterations=(4, 9))


OBS = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)


def test_every_transport_returns_the_policys_actions(run, tmp_path):
    expected = expected_actions(run, OBS)
    assert np.abs(expected).max() > 0.5
    with serving(run, port=0, unix=tmp_path / "s") as (_, url, _):
        for address in (url, f"unix:{tmp_path / 's'}"):
            with PolicyClient(address) as client:
                assert client.act(OBS) == pytest.approx(expected, abs=1e-6)
                actions = client.act(OBS[2])
                assert actions == pytest.approx(expected[2], abs=1e-6)
                assert actions.flags.writeable
                info = client.info()
                assert (info["task"], info["obs_dim"], info["policy_version"]) == (
                    "InvertedPendulum-v5",
                    4,
                    9,
                )
                assert (info["action"]["low"], info["action"]["high"]) == ([-3.0], [3.0])
        status, body = asked(f"{url}/act", json.dumps({"obs": OBS.tolist()}).encode())
        assert (status, json.loads(body)["policy_version"]) == (200, 9)
        assert np.array(json.loads(body)["actions"]) == pytest.approx(expected, abs=1e-6)
        status, body = asked(f"{url}/act", OBS.tobytes(), "application/octet-stream")
        assert np.frombuffer(body, "<f4").reshape(5, 1) == pytest.approx(expected, abs=1e-6)
        status, body = asked(f"{url}/stats")
        stats = json.loads(body)
        assert (stats["requests"], stats["refused"]) == (6, 0)
        assert stats["latency"]["p99_ms"] >= stats["latency"]["p50_ms"] > 0
        assert json.loads(asked(f"{url}/health")[1])["status"] == "ok"
    assert not (tmp_path / "s").exists()


def test_prometheus_gets_the_servers_counters(run):
    with serving(run, port=0) as (server, url, _):
        assert asked(f"{url}/act", OBS.tobytes(), "application/octet-stream")[0] == 200
        assert asked(f"{url}/act", OBS[:2].tobytes(), "application/octet-stream")[0] == 200
        assert asked(f"{url}/act", b"{}")[0] == 400
        server.statistics.latency = Latencies()
        for seconds in (2e-4, 4e-4, 0.3, 99.0):
            server.statistics.latency.add(seconds)
        status, body = asked(f"{url}/metrics")
    assert status == 200
    samples = {
        sample.name + "".join(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }
    counted = [
        samples[f"rayagi_policy_{name}"]
        for name in ("requests_total", "rows_total", "refused_total", "version")
    ]
    assert counted == [2, 7, 1, 9]
    latency = "rayagi_policy_latency_seconds"
    buckets = [
        samples[f"{latency}_bucket{bound}"]
        for bound in ("0.0001", "0.00025", "0.0005", "0.25", "0.5", "50", "+Inf")
    ]
    assert buckets == [0, 1, 2, 2, 3, 3, 4]
    assert samples[f"{latency}_count"] == 4
    assert samples[f"{latency}_sum"] == pytest.approx(99.3006)
    assert samples["rayagi_policy_inference_seconds_count"] == samples["rayagi_policy_batches_total"]


def test_a_refused_method_names_those_that_are_allowed(run):
    with serving(run, port=0) as (_, url, _), pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(f"{url}/act", method="DELETE"), timeout=10)
    assert (refused.value.code, refused.value.headers["Allow"]) == (405, "POST")


@pytest.mark.parametrize("core", ["none", "gru"])
def test_a_request_of_many_pieces_has_the_answers_of_its_rows_alone(tmp_path, core):
    """To float32 rounding: torch's matrix products differ with the number of rows."""
    run = saved_run(tmp_path / "runs", core=core)
    policy = saved_policy(run, "best").policy
    obs = np.random.default_rng(1).standard_normal((1000, 4)).astype(np.float32)
    expected = Agent(policy).act_greedily(torch.from_numpy(obs)).clamp(-3.0, 3.0).numpy()
    assert len(np.unique(expected.round(3))) > 100
    with serving(run, port=0, unix=tmp_path / "s") as (_, url, _):
        for address in (url, f"unix:{tmp_path / 's'}"):
            with PolicyClient(address) as client, PolicyClient(address) as other:
                assert client.act(obs) == pytest.approx(expected, abs=1e-6)
                assert other.act(obs[7]) == pytest.approx(expected[7], abs=1e-6)
        rows = np.concatenate((obs, np.zeros((1000, policy.state_dim), np.float32)), axis=1)
        text = json.dumps({"obs": rows.tolist()})
        status, body = asked(f"{url}/act", text.encode())
        assert (status, set(json.loads(body))) == (
            200,
            {"actions", "policy_version"} | ({"states"} if core == "gru" else set()),
        )
        assert np.array(json.loads(body)["actions"]) == pytest.approx(expected, abs=1e-6)
        status, body = asked(f"{url}/act", text[:-3].encode())  # the error is in the last piece
        assert (status, "expected" in json.loads(body)["error"]) == (400, True)


def test_discrete_actions_are_integers(tmp_path):
    run = saved_run(tmp_path, "CartPole-v1")
    with serving(run, port=0, unix=tmp_path / "s") as (_, url, _):
        for address in (url, f"unix:{tmp_path / 's'}"):
            with PolicyClient(address) as client:
                choices = client.act(OBS)
                assert choices.dtype == np.int64
                assert choices.shape == (5,)
                assert set(choices.tolist()) <= {0, 1}
                assert client.act(OBS[0]) == choices[0]


def test_invalid_requests_are_rejected_and_the_server_continues(run, tmp_path):
    with serving(run, port=0, unix=tmp_path / "s", max_rows=8) as (server, url, _):
        for body, kind, status in [
            (b'{"obs": [1]}', "application/json", 400),
            (b'{"obs": [1, 2, 3, NaN]}', "application/json", 400),
            (b"x" * 17, "application/octet-stream", 400),
            (b"\0" * 16 * 9, "application/octet-stream", 413),
            (b"\0" * 10**6, "application/octet-stream", 413),
            (b"<obs/>", "application/xml", 415),
        ]:
            found, answer = asked(f"{url}/act", body, kind)
            assert (found, "expected" in json.loads(answer)["error"]) == (status, True), body[:20]
        assert asked(f"{url}/nothing")[0] == 404
        assert asked(f"{url}/act")[0] == 405
        for client in (PolicyClient(url), PolicyClient(f"unix:{tmp_path / 's'}")):
            for shape in ((9, 4), (4, 3), (3,)):
                with pytest.raises(PolicyRefusedError, match=r"expected .*\(rows, 4\), at most 8 rows"):
                    client.act(np.zeros(shape))
            with pytest.raises(PolicyRefusedError, match="not finite"):
                client.act([np.inf, 0, 0, 0])
            assert client.act(OBS[0]) == pytest.approx(expected_actions(run, OBS)[0], abs=1e-6)
        assert server.statistics.refused == 6 + 2 + 4 + 1


HEAD = b"POST /act HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (HEAD + b"Content-Length: -5\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcdeXX\r\n", 400),
        (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nabcde", 400),
        (HEAD + b"Content-Length: 5\r\n\r\nabcde", 400),
        (HEAD + b'Content-Length: 13\r\n\r\n{"obs": true}', 400),
        (HEAD + b"Expect: nonsense\r\nContent-Length: 5\r\n\r\nabcde", 417),
        (b"GET http://[::1 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", 400),
        (b"GET /info HTTP/1.1\r\n" + b"A: b\r\n" * 20_000 + b"\r\n", 400),
        (HEAD + b"Content-Length: 500\r\n\r\nabcde", None),  # and disconnects
    ],
)
def test_bad_requests_leave_no_traceback_in_the_log(run, caplog, request_bytes, status):
    with serving(run, port=0) as (server, url, _):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.settimeout(30)
            client.sendall(request_bytes)
            if status is not None:
                assert client.recv(1000).split()[1] == str(status).encode()
        assert asked(f"{url}/health")[0] == 200
    assert [
        record for record in caplog.records if record.exc_info or "Traceback" in record.getMessage()
    ] == []
    assert all(len(record.getMessage()) < 300 for record in caplog.records)


def test_a_client_without_valid_frames_gets_an_error_and_is_disconnected(run, tmp_path):
    with serving(run, unix=tmp_path / "s") as (_, _, _), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(30)
        client.connect(str(tmp_path / "s"))
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        output = b""
        while more := client.recv(65536):
            output += more
        hello = header(output[: HEADER.size])
        assert hello.kind == Kind.HELLO
        error = output[HEADER.size + hello.body_bytes :]
        assert header(error[: HEADER.size]).kind == Kind.ERROR
        assert b"expected a frame that begins with b'RAG1'" in error
        with PolicyClient(f"unix:{tmp_path / 's'}") as other:
            other.act(OBS)


def test_slow_and_dead_clients_do_not_delay_others(run, tmp_path, monkeypatch):
    monkeypatch.setattr("rayagi.serving.policy_server.http_frontend.READ_S", 0.5)
    monkeypatch.setattr(server_module, "IDLE_S", 1.0)
    with serving(run, port=0, unix=tmp_path / "s") as (server, url, _):
        half = socket.create_connection(("127.0.0.1", server.port))
        half.sendall(
            b"POST /act HTTP/1.1\r\nHost: a\r\nContent-Type: application/octet-stream\r\nContent-Length: 16\r\n\r\nab"
        )
        silent = socket.create_connection(("127.0.0.1", server.port))
        local = socket.socket(socket.AF_UNIX)
        local.connect(str(tmp_path / "s"))
        local.sendall(frame(Kind.OBSERVE, 1, OBS.tobytes())[:-3])
        dead = socket.socket(socket.AF_UNIX)
        dead.connect(str(tmp_path / "s"))
        dead.sendall(frame(Kind.OBSERVE, 1, OBS.tobytes()))
        dead.close()
        # A client that sends for ever and never reads: the server stops reading from it.
        deaf = socket.socket(socket.AF_UNIX)
        deaf.connect(str(tmp_path / "s"))
        deaf.settimeout(0.2)
        many = frame(Kind.OBSERVE, 1, np.zeros((1000, 4), "<f4").tobytes())
        with pytest.raises(TimeoutError):
            deaf.sendall(10_000 * many)
        for address in (url, f"unix:{tmp_path / 's'}"):
            with PolicyClient(address) as client:
                for _ in range(20):
                    client.act(OBS)
        half.settimeout(30)
        assert b"408" in half.recv(1000).splitlines()[0]
        silent.settimeout(30)
        assert silent.recv(1) == b""  # disconnected
        for each in (half, silent, local, deaf):
            each.close()


@pytest.mark.parametrize("frontend", ["http", "unix"])
def test_requests_of_a_client_that_disconnected_are_dropped(run, tmp_path, frontend):
    in_service, released = threading.Event(), threading.Event()
    body = np.zeros((4096, 4), "<f4").tobytes()
    with serving(run, port=0, unix=tmp_path / "s") as (server, url, _):
        act = server._policy.current.act

        def held(obs):
            in_service.set()
            assert released.wait(60)
            return act(obs)

        server._policy.current.act = held
        if frontend == "unix":
            gone = socket.socket(socket.AF_UNIX)
            gone.connect(str(tmp_path / "s"))
            gone.sendall(3 * frame(Kind.OBSERVE, 1, body))
        else:
            gone = socket.create_connection(("127.0.0.1", server.port))
            head = f"POST /act HTTP/1.1\r\nHost: a\r\nContent-Type: application/octet-stream\r\nContent-Length: {len(body)}"
            gone.sendall(head.encode() + b"\r\n\r\n" + body)
        assert in_service.wait(60)
        (requests,) = server._batcher._waiting.values()
        gone.close()
        until(requests[0].answer.cancelled)
        released.set()
        with PolicyClient(url, timeout_s=60) as client:
            client.act(OBS)
        until(lambda: not server._batcher._waiting)
        assert server.statistics.rows == 128 + len(OBS)  # the piece in service, and the other client's


def test_a_client_that_has_ended_its_requests_gets_all_answers(run, tmp_path):
    with serving(run, unix=tmp_path / "s") as (server, _, _):
        act, released = server._policy.current.act, threading.Event()

        def held(obs):
            assert released.wait(60)
            return act(obs)

        server._policy.current.act = held
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(60)
            client.connect(str(tmp_path / "s"))
            client.sendall(b"".join(frame(Kind.OBSERVE, number, OBS.tobytes()) for number in (1, 2, 3)))
            client.shutdown(socket.SHUT_WR)
            released.set()
            received = b"".join(iter(lambda: client.recv(65536), b""))
        _, _, hello_bytes = header(received[: HEADER.size])
        rest, numbers = received[HEADER.size + hello_bytes :], []
        while rest:
            kind, number, num_bytes = header(rest[: HEADER.size])
            assert (kind, num_bytes) == (Kind.ACTIONS, 4 * len(OBS))
            numbers.append(number)
            rest = rest[HEADER.size + num_bytes :]
    assert numbers == [1, 2, 3]


@pytest.mark.parametrize(("most_bytes", "unanswered"), [(3 * 2**16, 3), (1000, 1)])
def test_the_server_reads_no_more_from_a_client_with_many_bytes_unanswered(
    run, tmp_path, monkeypatch, most_bytes, unanswered
):
    monkeypatch.setattr(socket_frontend, "_PIPELINED_BYTES", most_bytes)
    body = np.zeros((4096, 4), "<f4").tobytes()
    frames = b"".join(frame(Kind.OBSERVE, number, body) for number in range(60))
    with serving(run, unix=tmp_path / "s") as (server, _, _):
        act, released = server._policy.current.act, threading.Event()

        def held(obs):
            assert released.wait(60)
            return act(obs)

        server._policy.current.act = held
        with socket.socket(socket.AF_UNIX) as full, socket.socket(socket.AF_UNIX) as client:
            full.connect(str(tmp_path / "s"))
            full.settimeout(0.5)
            with pytest.raises(TimeoutError):
                full.sendall(frames)
            assert len(server._batcher._waiting[next(iter(server._batcher._waiting))]) == unanswered
            full.close()
            client.connect(str(tmp_path / "s"))
            client.settimeout(60)
            sender = threading.Thread(target=client.sendall, args=(frames,))
            sender.start()
            released.set()
            numbers = []
            with client.makefile("rb") as received:
                while len(numbers) < 60:
                    kind, number, num_bytes = header(received.read(HEADER.size))
                    received.read(num_bytes)
                    numbers += [number] if kind == Kind.ACTIONS else []
            sender.join()
    assert numbers == list(range(60))


def test_large_bodies_of_all_clients_have_a_limit_together(run, monkeypatch):
    frontend = "rayagi.serving.policy_server.http_frontend"
    monkeypatch.setattr(f"{frontend}.BODIES_BYTES", 0)
    with serving(run, port=0, max_rows=8192) as (_, url, _):
        limit = 4 * Expected(obs_dim=4, max_rows=8192).max_body_bytes
        head = b"POST /act HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
        port, clients, answers = int(url.rpartition(":")[2]), [], []
        while not answers:  # each sends all but the last byte, and stays
            assert len(clients) <= limit // (1_000_000 - 2**16) + 1
            client = socket.create_connection(("127.0.0.1", port))
            clients.append(client)
            client.sendall(head + b'{"obs": [' + b" " * (1_000_000 - 10))
            client.settimeout(0.2)
            with suppress(TimeoutError):
                answers.append(client.recv(1000))
        assert b"503" in answers[0].splitlines()[0]
        assert len(clients) == limit // (1_000_000 - 1 - 2**16) + 1
        with PolicyClient(url) as small:
            assert small.act(OBS).shape == (5, 1)  # small ones are answered meanwhile
        for client in clients:
            client.close()
        large = np.zeros((8192, 4), "<f4")
        with PolicyClient(url) as again:
            until(lambda: answered(again, large))


def answered(client, obs):
    """Whether the server has taken the request: its memory is free again when it has noticed lost clients."""
    try:
        return client.act(obs) is not None
    except ConnectionError:
        return False


def test_infinite_bounds_are_null_in_info(run):
    policy = ServedPolicy(run, "best")
    action = replace(policy.saved.info.action, low=(-math.inf,), high=(math.inf,))
    saved = replace(policy.saved, info=replace(policy.saved.info, action=action))
    policy.current.saved = saved
    assert json.loads(json.dumps(policy.info(), allow_nan=False))["action"]["low"] == [None]


@pytest.mark.parametrize(
    ("low", "high", "least", "greatest"),
    [
        (-0.5, 0.25, -0.5, 0.25),
        (
            -0.3,
            0.1,
            -0.29999998211860657,
            0.09999999403953552,
        ),  # the nearest ones are -0.30000001 and 0.100000001
        (-0.1, 0.3, -0.09999999403953552, 0.29999998211860657),
        (-1e300, 1e300, -3.4028234663852886e38, 3.4028234663852886e38),
        (-math.inf, math.inf, -math.inf, math.inf),
    ],
)
def test_actions_are_within_a_range_of_float64(run, low, high, least, greatest):
    saved = saved_policy(run, "best")
    action = replace(saved.info.action, low=(low,), high=(high,))
    policy = GreedyPolicy(replace(saved, info=replace(saved.info, action=action)))
    bias = saved.policy.model.policy[-1].bias.detach()
    found = []
    for mean in (-math.inf, math.inf):
        bias.fill_(mean)
        found.append(policy.act(np.zeros((1, 4), np.float32)))
    assert found[0].dtype == np.float32
    assert np.concatenate(found).tolist() == [[least], [greatest]]


def test_a_checkpoint_of_other_arrays_of_observations_is_not_used(tmp_path):
    policy = ServedPolicy(saved_run(tmp_path), "best")
    leaves = tuple(ObsLeaf(path=(key,), shape=(2,)) for key in ("arm", "goal"))
    own = replace(policy.saved, info=replace(policy.saved.info, obs_leaves=leaves))
    policy.current = GreedyPolicy(own)
    policy.exchange(own)
    with pytest.raises(
        ValueError, match="observations of other arrays; clients expect the obs_leaves of /info"
    ):
        policy.exchange(replace(own, info=replace(own.info, obs_leaves=leaves[::-1])))


def test_without_the_token_only_health_is_answered(run):
    with serving(run, port=0, token="a-token-that-is-long") as (_, url, _):
        for path in ("/info", "/stats", "/metrics"):
            assert asked(f"{url}{path}")[0] == 401
            assert asked(f"{url}{path}", Authorization="Bearer a-token-that-is-lonh")[0] == 401
            assert asked(f"{url}{path}", Authorization="Bearer ä".encode().decode("latin-1"))[0] == 401
            assert asked(f"{url}{path}", Authorization="Bearer a-token-that-is-long")[0] == 200
        assert asked(f"{url}/health")[0] == 200
        with pytest.raises(PolicyRefusedError, match="the token is missing or wrong"):
            PolicyClient(url).act(OBS)
        assert PolicyClient(url, token="a-token-that-is-long\n").act(OBS).shape == (5, 1)


def test_a_request_that_the_policy_fails_on_is_refused_at_once_with_its_reason(run, tmp_path):
    with serving(run, port=0, unix=tmp_path / "s") as (server, url, _):

        def fail(obs):
            raise ArithmeticError("no mode here")

        server._policy.current.act = fail
        for address in (url, f"unix:{tmp_path / 's'}"):
            with (
                PolicyClient(address, timeout_s=60) as client,
                pytest.raises(PolicyRefusedError, match=r"^the policy failed: no mode here$"),
            ):
                client.act(OBS)
        assert server.statistics.refused == 2  # one request each: none was repeated


@pytest.mark.parametrize("transport", ["http", "unix"])
def test_info_is_that_of_the_policy_in_use(tmp_path, transport):
    run = saved_run(tmp_path / "runs", iterations=(1,))
    folder = open_run(run)
    with serving(run, port=0, unix=tmp_path / "a#b?c") as (server, url, _):
        address = url if transport == "http" else f"unix:{tmp_path / 'a#b?c'}"
        with PolicyClient(address) as client:
            assert client.info()["policy_version"] == 1
            save(folder, run_spec_from_dict(folder.read_config()), 2)
            server._policy.exchange(server._policy.read())
            assert client.info()["policy_version"] == 2
            assert client.act(OBS).shape == (5, 1)


def test_clients_reconnect_after_a_server_restart(run, tmp_path):
    path = tmp_path / "s"
    with serving(run, port=0, unix=path) as (server, url, _):
        clients = [PolicyClient(url, timeout_s=20), PolicyClient(f"unix:{path}", timeout_s=20)]
        for client in clients:
            client.act(OBS)
        port = server.port
    with serving(run, port=port, unix=path):
        for client in clients:
            assert client.act(OBS).shape == (5, 1)
    for client in clients:
        client._timeout_s = 0.3
        with pytest.raises(PolicyUnreachableError, match=r"did not answer within 0\.3 s"):
            client.act(OBS)


def test_a_newer_checkpoint_is_followed_and_a_damaged_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "POLL_S", 0.02)
    run = saved_run(tmp_path, iterations=(1,))
    folder = open_run(run)
    spec = run_spec_from_dict(folder.read_config())
    with serving(run, which="last", port=0, follow=True) as (_, url, messages), PolicyClient(url) as client:
        assert client.act(OBS) == pytest.approx(expected_actions(run, OBS), abs=1e-6)
        before = client.act(OBS)
        save(folder, spec, 2)
        until(lambda: client.info()["policy_version"] == 2)
        after = client.act(OBS)
        assert after == pytest.approx(expected_actions(run, OBS, "last"), abs=1e-6)
        assert np.abs(after - before).max() > 0.1
        # One of other networks: the old one stays in use.
        other = open_run(saved_run(tmp_path, "CartPole-v1", name="b"))
        state = other.checkpoints.load("last").state
        folder.checkpoints.save({**state, "local": []}, {"iteration": 3, "env_steps": 1})
        until(lambda: any("kept iteration_000002" in text for text in messages))
        assert client.act(OBS) == pytest.approx(after)


def test_a_checkpoint_that_cannot_be_loaded_does_not_end_the_following(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "POLL_S", 0.02)
    run = saved_run(tmp_path, iterations=(1,))
    folder = open_run(run)
    spec = run_spec_from_dict(folder.read_config())
    with (
        serving(run, which="last", port=0, follow=True) as (server, url, messages),
        PolicyClient(url) as client,
    ):
        read = server._policy.read

        def fail():
            raise KeyError("goal")

        server._policy.read = fail
        save(folder, spec, 2)
        until(lambda: any("kept iteration_000001: 'goal'" in text for text in messages))
        server._policy.read = read
        save(folder, spec, 3)
        until(lambda: client.info()["policy_version"] == 3)


def test_a_damaged_newer_checkpoint_is_not_replaced_by_another_one(tmp_path):
    run = saved_run(tmp_path, iterations=(2,))
    folder = open_run(run)
    spec, messages = run_spec_from_dict(folder.read_config()), []
    policy = ServedPolicy(run, "best")
    server = PolicyServer(policy, ServerSettings(), messages.append)
    save(folder, spec, 3)
    save(folder, spec, 4)
    (run / "checkpoints/best.json").write_text('{"checkpoint": "iteration_000003"}')
    weights = run / "checkpoints/iteration_000003/shared.pt"
    intact = weights.read_bytes()
    weights.write_bytes(intact[:-1])
    asyncio.run(server.reload())
    assert policy.saved.checkpoint == "iteration_000002"
    assert "kept iteration_000002: " in messages[0]
    assert f"shared.pt has {len(intact) - 1} bytes where {len(intact)} were written" in messages[0]
    assert (
        ServedPolicy(run, "best").saved.checkpoint == "iteration_000004"
    )  # at start-up there is no current one
    weights.write_bytes(intact)
    asyncio.run(server.reload())
    assert policy.saved.checkpoint == "iteration_000003"


def test_following_goes_on_after_damaged_checkpoints_and_pointers(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "POLL_S", 0.02)
    run = saved_run(tmp_path, iterations=(1,))
    folder = open_run(run)
    spec = run_spec_from_dict(folder.read_config())
    with serving(run, port=0, follow=True) as (server, _, messages):
        newest, pointer = server._policy.newest, run / "checkpoints/best.json"

        def fail():
            raise ValueError("no list of names")

        server._policy.newest = fail
        until(lambda: len(messages) == 2)
        assert messages[1] == "cannot look for a newer checkpoint, and will try again: no list of names"
        server._policy.newest = newest
        pointer.write_text("[" * 100_000)
        save(folder, spec, 2)
        weights = run / "checkpoints/iteration_000002/shared.pt"
        until(lambda: server._policy.saved.version == 2)
        intact = weights.read_bytes()
        weights.write_bytes(intact[:-1])
        until(lambda: any("kept iteration_000002: " in text for text in messages))
        repaired = messages.count("now iteration_000002 (2,000 environment steps)")
        weights.write_bytes(intact)
        until(lambda: messages.count("now iteration_000002 (2,000 environment steps)") > repaired)


def test_a_server_that_waits_for_a_slow_client_accepts_no_others(run, tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "DRAIN_S", 600.0)
    with (
        serving(run, port=0, unix=tmp_path / "s") as (server, _, _),
        socket.socket(socket.AF_UNIX) as slow,
    ):
        slow.settimeout(60)
        slow.connect(str(tmp_path / "s"))
        many = frame(Kind.OBSERVE, 1, np.zeros((4096, 4), "<f4").tobytes())
        slow.sendall(40 * many)
        slow.shutdown(socket.SHUT_WR)
        until(lambda: server.statistics.requests == 40)  # more than the buffers of the socket hold
        server._batcher._loop.call_soon_threadsafe(server.stop)

        def is_refused():
            try:
                socket.create_connection(("127.0.0.1", server.port)).close()
            except ConnectionRefusedError:
                return True
            return False

        until(is_refused)
        received = b"".join(iter(lambda: slow.recv(2**20), b""))
    _, _, hello_bytes = header(received[: HEADER.size])
    assert len(received) == HEADER.size + hello_bytes + 40 * (HEADER.size + 4096 * 4)


def test_an_address_in_use_is_an_error(run, tmp_path):
    async def listen(**settings):
        await PolicyServer(ServedPolicy(run, "best"), ServerSettings(**settings), print).run(signals=False)

    with serving(run, port=0, unix=tmp_path / "s") as (server, _, _):
        with pytest.raises(
            ListenError, match=f"cannot listen at 127.0.0.1:{server.port}: Address already in use"
        ):
            asyncio.run(listen(port=server.port))
        with pytest.raises(ListenError, match="another server listens there; end it"):
            asyncio.run(listen(unix=tmp_path / "s"))
    with pytest.raises(ListenError, match="AF_UNIX path too long; choose another --unix path"):
        asyncio.run(listen(unix=tmp_path / ("s" * 200)))
    (tmp_path / "notes").write_text("keep me")
    with pytest.raises(ListenError, match="the path exists and is no socket"):
        asyncio.run(listen(unix=tmp_path / "notes"))
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "stale"))
    stale.close()  # of a server that was killed
    with serving(run, unix=tmp_path / "stale"), PolicyClient(f"unix:{tmp_path / 'stale'}") as client:
        client.act(OBS)


def test_a_socket_of_another_user_stays(run, tmp_path, monkeypatch):
    """The file's mode refuses the connection; whether somebody listens cannot be known."""
    with serving(run, unix=tmp_path / "s"):

        def refuse(self, address):
            raise PermissionError(errno.EACCES, "Permission denied")

        with monkeypatch.context() as patch:
            patch.setattr(socket_frontend.socket.socket, "connect", refuse)
            with pytest.raises(ListenError, match="a socket is there already: Permission denied"):
                socket_frontend._refuse_taken(tmp_path / "s")
        with PolicyClient(f"unix:{tmp_path / 's'}") as client:
            client.act(OBS)


def test_a_server_that_ends_leaves_its_successor_s_socket(run, tmp_path):
    with serving(run, unix=tmp_path / "s"):
        (tmp_path / "s").unlink()
        successor = socket.socket(socket.AF_UNIX)
        successor.bind(str(tmp_path / "s"))
    assert (tmp_path / "s").exists()
    successor.close()


def test_only_this_user_may_open_the_socket(run, tmp_path):
    with serving(run, unix=tmp_path / "s"):
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("a.b", False),
    ],
)
def test_what_only_this_machine_reaches(host, expected):
    assert is_loopback(host) is expected


def test_a_client_loads_neither_torch_nor_ray():
    code = (
        "import sys, rayagi.serving.client; print({'torch', 'ray', 'pyarrow', 'aiohttp'} & set(sys.modules))"
    )
    done = run_python(code)
    assert done.stdout == "set()\n"


@pytest.mark.usefixtures("default_signals")
def test_the_command_creates_a_token_for_other_hosts_reloads_on_sighup_and_drains_on_sigterm(run):
    command = [sys.executable, "-m", "rayagi", "policy-server", str(run), "--port", "0", "--host", "0.0.0.0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        token = port = None
        for line in process.stdout:
            token = token or (re.search(r"Authorization: Bearer TOKEN'\): (\S+)", line) or [None, None])[1]
            port = (re.search(r"HTTP at http://0\.0\.0\.0:(\d+)", line) or [None, None])[1]
            if port:
                break
        with pytest.raises(PolicyRefusedError, match="token"):
            PolicyClient(f"http://127.0.0.1:{port}", timeout_s=30).act(OBS)
        assert PolicyClient(f"http://127.0.0.1:{port}", token=token, timeout_s=30).act(OBS).shape == (5, 1)
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "now iteration_000009 (9,000 environment steps)\n"
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        assert "1 request (5 observations) in 1 batch, 1 refused" in output
        assert "latency in the server: p50" in output
        assert process.returncode == 0
    finally:
        process.kill()


@pytest.mark.usefixtures("default_signals")
def test_connections_beyond_the_limit_of_open_files_are_one_line_in_the_log(run, tmp_path):
    address = f"unix:{tmp_path / 's'}"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rayagi", "policy-server", str(run), "--unix", str(tmp_path / "s")],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        until(lambda: "local socket" in process.stdout.readline())
        with PolicyClient(address, timeout_s=60) as client:
            client.act(OBS)
            most = len(os.listdir(f"/proc/{process.pid}/fd")) + 2
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (most, most))
            others = [socket.socket(socket.AF_UNIX) for _ in range(10)]
            for other in others:
                other.connect(str(tmp_path / "s"))
            until(lambda: (tmp_path / "log").stat().st_size > 0)
            assert client.act(OBS).shape == (5, 1)
            for other in others:
                other.close()
            client.info()  # of a new connection
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert (tmp_path / "log").read_text() == (
        "no new connections are accepted: Too many open files; close idle ones, or raise the limit\n"
    )


@pytest.mark.usefixtures("default_signals")
def test_in_a_scripts_background_ctrl_c_is_not_for_the_server_and_sigterm_ends_it(run, tmp_path):
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def main():
        reloaded = asyncio.Event()

        def log(text):
            if text.startswith("now iteration_"):
                reloaded.set()

        server = PolicyServer(ServedPolicy(run, "best"), ServerSettings(unix=tmp_path / "s"), log)
        task = asyncio.create_task(server.run())
        await server.ready.wait()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGHUP)  # comes after it
        await asyncio.wait_for(reloaded.wait(), 60)
        assert not task.done()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(task, 60)

    threads = torch.get_num_threads()
    asyncio.run(main())
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("kind", "actions"),
    [
        ("multi_discrete", np.array([[1, 2, 0], [0, 1, 3]])),
        ("discrete", np.array([4, 0, 7])),
        ("continuous", np.array([[0.5, -1.0], [2.0, 0.25]], np.float32)),
    ],
)
def test_a_frame_of_actions_is_what_was_sent(kind, actions):
    received = decoded_answers(
        encoded(actions, "raw"), {"action": {"kind": kind, "dim": actions.shape[-1]}}, len(actions)
    )
    assert (received.dtype, received.tolist()) == (actions.dtype, actions.tolist())


@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_a_recurrent_policys_states_stay_with_each_client_over_every_transport(tmp_path, core):
    run = saved_run(tmp_path / "runs", core=core)
    policy = saved_policy(run, "best").policy
    agent = Agent(policy)
    expected = [agent.act_greedily(torch.from_numpy(OBS)).clamp(-3.0, 3.0).numpy() for _ in range(3)]
    agent.reset(torch.tensor([1]))
    after_reset = agent.act_greedily(torch.from_numpy(OBS)).clamp(-3.0, 3.0).numpy()
    assert np.abs(expected[2] - expected[0]).max() > 1e-4  # the same observations, another history
    with serving(run, port=0, unix=tmp_path / "s") as (_, url, _):
        for address in (url, f"unix:{tmp_path / 's'}"):
            with PolicyClient(address) as client, PolicyClient(address) as other:
                assert client.info()["state_dim"] == policy.state_dim > 0
                for wanted in expected:
                    assert client.act(OBS) == pytest.approx(wanted, abs=1e-6)
                client.reset([])
                client.reset([1])
                assert client.act(OBS) == pytest.approx(after_reset, abs=1e-6)
                assert other.act(OBS) == pytest.approx(expected[0], abs=1e-6)
                assert other.act(OBS).flags.writeable
                client.reset()
                assert client.act(OBS) == pytest.approx(expected[0], abs=1e-6)
                assert client.act(OBS[2]) == pytest.approx(expected[0][2], abs=1e-6)  # another number of rows
        row = [*OBS[0].tolist(), *[0.0] * policy.state_dim]
        status, body = asked(f"{url}/act", json.dumps({"obs": row}).encode())
        answer = json.loads(body)
        assert status == 200
        assert answer["actions"] == pytest.approx(expected[0][0].tolist(), abs=1e-6)
        following = [*OBS[0].tolist(), *answer["states"]]
        _, body = asked(f"{url}/act", json.dumps({"obs": following}).encode())
        assert json.loads(body)["actions"] == pytest.approx(expected[1][0].tolist(), abs=1e-6)
        status, body = asked(f"{url}/act", json.dumps({"obs": OBS[0].tolist()}).encode())
        assert status == 400
        assert f"each of 4 numbers and a state of {policy.state_dim}" in json.loads(body)["error"]


@pytest.mark.parametrize("core", ["none", "gru"])
def test_a_squashed_policys_actions_are_those_of_the_environment(tmp_path, core):
    run = saved_run(tmp_path / "runs", core=core, head="squashed_gaussian")
    policy = saved_policy(run, "best").policy
    with torch.inference_mode():
        observed = policy.observe(torch.from_numpy(OBS))
        states = torch.zeros(len(OBS), policy.state_dim)
        outputs = policy.step(observed, states)[0] if policy.state_dim else policy.outputs(observed)
    expected = 3.0 * outputs.tanh().numpy()  # the range is [-3, 3]
    assert np.abs(expected - outputs.numpy()).max() > 0.01
    with serving(run, port=0) as (_, url, _), PolicyClient(url) as client:
        assert client.act(OBS) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("cores", [("gru", "lstm"), ("none", "gru"), ("lstm", "none")])
def test_a_client_begins_anew_when_the_server_returns_with_another_policy(tmp_path, cores):
    runs = [saved_run(tmp_path / core, core=core) for core in cores]
    for address in ("http", "unix"):
        settings, client = {"port": 0, "unix": tmp_path / "s"}, None
        for run in runs:
            expected = Agent(saved_policy(run, "best").policy).act_greedily(torch.from_numpy(OBS))
            with serving(run, **settings) as (server, url, _):
                settings["port"] = server.port
                client = client or PolicyClient(url if address == "http" else f"unix:{tmp_path / 's'}")
                assert client.act(OBS) == pytest.approx(expected.clamp(-3.0, 3.0).numpy(), abs=1e-6)
        client.close()


@pytest.mark.parametrize("core", ["none", "gru"])
def test_a_client_asks_once_whether_the_policy_has_states(tmp_path, core):
    run, asks = saved_run(tmp_path / "runs", core=core), []
    with serving(run, port=0) as (_, url, _), PolicyClient(url) as client:
        info = client._transport.info
        client._transport.info = lambda timeout_s: asks.append(timeout_s) or info(timeout_s)
        for _ in range(3):
            client.act(OBS)
    assert len(asks) == 1
