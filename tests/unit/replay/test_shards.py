"""Several shards as one table: those of this host in place, those of others over TCP; losses and returns."""

import logging
import os
import pickle
import signal
import socket
import struct
import threading
from contextlib import ExitStack, suppress
from itertools import product

import numpy as np
import pytest
import torch
from replay_tables import LENGTH, SCHEMA, SELECTORS, columns, content, shards_of
from shard_processes import ShardProcess

from actors.replay import (
    BatchStream,
    Gatherer,
    Keys,
    Prioritized,
    ReplayError,
    ReplayShard,
    ReplayShards,
    ReplayStore,
    ShardLostError,
    Subscription,
    SubSequences,
    TopK,
    Uniform,
    gather,
    select,
    select_centralised,
)
from actors.replay.shard import PROTOCOL
from actors.replay.table import LocalShards
from actors.replay.wire import WireError, receive, send
from collectives.rendezvous import poll

ROWS = 30
RNG = np.random.default_rng(7)
LENGTHS = RNG.integers(1, LENGTH + 1, ROWS)
PRIORITIES = np.where(np.arange(ROWS) % 11 == 3, 0.0, 10 * RNG.random(ROWS) ** 2)
WINDOWS = [
    Subscription(column="obs", offset=-1, length=4),
    Subscription(column="action", length=3, padding="head"),
    Subscription(column="done"),
]


@pytest.fixture
def served():
    """Makes tables whose shards are on hosts of these names; readers are on host "here"."""
    with ExitStack() as stack:

        def make(*hosts, rows=ROWS, lengths=LENGTHS, priorities=PRIORITIES):
            stores = shards_of(rows, len(hosts), SELECTORS, lengths, priorities, np.arange(rows) % 7)
            shards = [ReplayShard(store, host_id=host) for store, host in zip(stores, hosts, strict=True)]
            table = ReplayShards([shard.address for shard in shards], host_id="here", timeout_s=20)
            for resource in (*shards, table):
                stack.enter_context(resource)
            return table, shards

        yield make


def processes(stack, hosts, **options):
    made = [ShardProcess(10, k, len(hosts), host_id=host, **options) for k, host in enumerate(hosts)]
    for process in made:
        stack.callback(process.kill)
    return made


HOSTS = [
    ["away"],
    ["here"],
    ["here", "away"],
    ["away", "here", "away"],
    ["away", "here", "here", "away", "here"],
]


@pytest.mark.parametrize("hosts", HOSTS, ids=" ".join)
def test_the_list_and_the_batch_are_those_of_one_store(served, hosts):
    (whole,) = shards_of(ROWS, 1, SELECTORS, LENGTHS, PRIORITIES, np.arange(ROWS) % 7)
    table, _ = served(*hosts)
    assert table.local == [k for k, host in enumerate(hosts) if host == "here"]
    for draw, (selector, choose) in enumerate(product(SELECTORS, (select, select_centralised))):
        expected = select(whole, selector, 12, seed=3, draw=draw)
        found = choose(table, selector, 12, seed=3, draw=draw)
        for one, other in zip(columns(expected), columns(found), strict=True):
            np.testing.assert_array_equal(one, other)
        wanted, batch = gather(whole, expected, WINDOWS), gather(table, found, WINDOWS, threads=3)
        for name in wanted.values:
            np.testing.assert_array_equal(wanted.values[name], batch.values[name])
            np.testing.assert_array_equal(wanted.masks[name], batch.masks[name])
        assert batch.current.all()
    np.testing.assert_array_equal(whole.status()["sampled"], table.status()["sampled"])


def test_threads_and_tensors_hold_the_rows_at_their_places(served, monkeypatch):
    monkeypatch.setattr("actors.replay.subscriptions._BYTES_PER_START", 1)
    table, _ = served("here", "away", "here")
    chosen = select(table, Uniform(), 64, seed=0, draw=0)
    out = {"obs": torch.full((64, 3), -1.0)}
    gatherer = Gatherer(table, [Subscription(column="obs")], 64, out=out, threads=5)
    for _ in range(2):
        assert gatherer(chosen).current.all()
        np.testing.assert_array_equal(out["obs"][:, 0], 100 * chosen.keys.indices)
    assert dict(table.reads) == dict(
        enumerate(2 * np.bincount(chosen.keys.indices // table.capacity, minlength=3))
    )


def test_updates_and_deletions_reach_their_owners_by_index_and_generation(served):
    table, shards = served("here", "away", "away")
    keys = Keys(np.array([25, 3, 14]), np.array([1, 1, 9], np.uint64))  # 14 has generation 1
    assert table.update_priorities(keys, [5.0, 6.0, 7.0]) == 2
    assert [shards[k].store.status()["priority"][i] for k, i in ((2, 5), (0, 3))] == [5.0, 6.0]
    assert shards[1].store.status()["priority"][4] == PRIORITIES[14]
    assert table.delete(keys) == 2
    assert len(table) == sum(len(shard.store) for shard in shards) == ROWS - 2
    assert table.counters()["deleted"] == 2
    status = table.status()
    assert status["index"].tolist() == list(range(ROWS))
    for request in (
        lambda: table.update_priorities(keys, [1.0, 2.0]),
        lambda: table.update_priorities(keys, -1.0),
        lambda: table.delete(Keys(np.array([ROWS]), np.array([1], np.uint64))),
        lambda: table.insert({"obs": np.zeros((1, 3, 3), "float64")}, shard=1),
    ):
        with pytest.raises(ReplayError, match=r"priorities of shape|priorities are|this table has|columns"):
            request()
    assert len(table) == ROWS - 2


def test_rows_are_written_on_this_host_or_where_the_caller_says():
    with ExitStack() as stack:
        stores = [ReplayStore.create(SCHEMA, 4, shard=k, num_shards=3) for k in range(3)]
        shards = [
            stack.enter_context(ReplayShard(store, host_id=host))
            for store, host in zip(stores, ("away", "here", "here"), strict=True)
        ]
        addresses = [shard.address for shard in shards]
        table = stack.enter_context(ReplayShards(addresses, host_id="here"))
        first = table.insert(content([1, 2]))
        second = table.insert(content([3]))
        assert first.indices.tolist() == [4, 5]
        assert second.indices.tolist() == [8]
        third = table.insert(content([7, 8]), [2, 3], [4.0, 5.0], 11, shard=0)
        status = stores[0].status()[:2]
        assert [status[name].tolist() for name in ("length", "priority", "timestamp")] == [
            [2, 3],
            [4.0, 5.0],
            [11, 11],
        ]
        assert third.generations.tolist() == [1, 1]
        np.testing.assert_array_equal(stores[0].block("obs", 1)[:4], content([8])["obs"][0, :4])
        for number in range(20, 32):  # full shards are overwritten in turn
            table.insert(content([number]))
        assert [store.counters()["inserted"] for store in stores[1:]] == [8, 7]
        for wrong in ({"shard": 3}, {"shard": -1}):
            with pytest.raises(ReplayError, match="this table has 0 to 2"):
                table.insert(content([1]), **wrong)
        with pytest.raises(ReplayError, match="an array of <U1"):
            table.insert({name: np.array([["a"]]) for name in content([1])}, shard=0)
        assert table.lost == []
        elsewhere = stack.enter_context(ReplayShards(addresses, host_id="nowhere"))
        assert elsewhere.local == []
        assert elsewhere.insert(content([5])).indices.tolist() == [2]  # the shard with the fewest rows


@pytest.mark.parametrize("lost", [0, 1])  # on this host, and on another
def test_a_lost_shard_takes_its_rows_only(lost, caplog):
    with ExitStack() as stack:
        made = processes(stack, ["here", "away", "here"])
        table = stack.enter_context(ReplayShards([process.address for process in made], host_id="here"))
        before = select(table, Prioritized(0.6, 0.4), 64, seed=0, draw=0)
        stream = stack.enter_context(BatchStream(table, Uniform(), WINDOWS, 16, seed=1))
        next(stream)
        caplog.set_level(logging.WARNING)
        made[lost].kill()
        batch = gather(table, before, WINDOWS)
        gone = before.keys.indices // 10 == lost
        np.testing.assert_array_equal(batch.current, ~gone)
        assert gone.any()
        assert not batch.masks["obs"][gone].any()
        assert not batch.values["obs"][gone].any()
        (loss,) = table.lost
        assert (loss.shard, loss.first, loss.last, loss.rows) == (lost, 10 * lost, 10 * lost + 9, 10)
        assert list(table.present) == [k for k in range(3) if k != lost]
        assert table.update_priorities(before.keys, 2.0) == (~gone).sum()
        for selector in SELECTORS:
            for choose in (select, select_centralised):
                found = choose(table, selector, 20, seed=0, draw=1)
                assert lost not in found.keys.indices // 10
        assert select(table, Uniform(), 5, seed=0, draw=0).probabilities.tolist() == [1 / 20] * 5
        with pytest.raises(ReplayError, match="21 different rows requested where 20 can be selected"):
            select(table, TopK(), 21, seed=0, draw=0)
        with pytest.raises(ShardLostError, match=f"shard {lost} is lost: insert the rows into another"):
            table.insert(content([1]), shard=lost)
        for _ in range(6):
            chosen, batch = next(stream)
        assert lost not in chosen.keys.indices // 10
        assert batch.current.all()
        assert f"shard {lost} is lost with 10 rows (indices {10 * lost} to {10 * lost + 9})" in caplog.text
        for process in made:
            process.kill()
        with pytest.raises(ReplayError, match="all shards of the table are lost"):
            select(table, Uniform(), 5, seed=0, draw=2)


def test_a_shard_returns_empty_and_no_key_of_its_lost_rows_fits():
    with ExitStack() as stack:
        made = processes(stack, ["away", "away"])
        addresses = [process.address for process in made]
        table = stack.enter_context(ReplayShards(lambda: addresses, host_id="here"))
        lost = select(table, Uniform(), 40, seed=0, draw=0)
        made[1].kill()
        assert list(table.present) == [0]
        again = ShardProcess(10, 1, 2, host_id="here", incarnation=0)
        stack.callback(again.kill)
        addresses[1] = again.address
        assert list(table.join()) == [0]  # with the incarnation of the lost one
        again.kill()
        newer = ShardProcess(10, 1, 2, host_id="here", incarnation=1, filled=False)
        stack.callback(newer.kill)
        addresses[1] = newer.address
        assert list(table.join()) == [0, 1]
        table.wait(1.0)
        assert len(table) == 10
        table.insert(content(range(50, 60)), shard=1)
        assert table.update_priorities(lost.keys, 9.0) == (lost.keys.indices < 10).sum()
        np.testing.assert_array_equal(gather(table, lost, WINDOWS).current, lost.keys.indices < 10)
        found = select(table, Uniform(), 40, seed=0, draw=1)
        assert gather(table, found, WINDOWS).current.all()
        assert set(found.keys.generations[found.keys.indices >= 10].tolist()) == {2**40 + 1}


def test_a_suspended_shard_is_lost_until_it_responds_again():
    with ExitStack() as stack:
        made = processes(stack, ["here", "away", "here"])
        table = stack.enter_context(
            ReplayShards([process.address for process in made], host_id="here", timeout_s=20)
        )
        keys = select(table, Uniform(), 40, seed=0, draw=0)
        for process in made[:2]:
            os.kill(process.pid, signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
        for connection in table._members[1].remote._idle:  # as if the 20 s had passed
            connection.settimeout(0.05)
        found = select(table, Uniform(), 40, seed=0, draw=1)
        assert set(found.keys.indices // 10) == {0, 2}  # a store of this host needs no process
        assert [str(loss).endswith("it has not responded for 20 s") for loss in table.lost] == [True]
        for process in made[:2]:
            os.kill(process.pid, signal.SIGCONT)
        table.wait(20.0)
        np.testing.assert_array_equal(
            columns(select(table, Uniform(), 40, seed=0, draw=0))[0], keys.keys.indices
        )
        assert gather(table, keys, WINDOWS).current.all()


def test_missing_shards_are_searched_for_beside_the_reader():
    with ExitStack() as stack:
        stores = [ReplayStore.create(SCHEMA, 5, shard=k, num_shards=2) for k in range(2)]
        addresses = [stack.enter_context(ReplayShard(stores[0])).address]
        table = stack.enter_context(ReplayShards(lambda: addresses))
        assert list(table.present) == [0]
        with pytest.raises(ShardLostError, match="1 of 2 replay shards are present after 0 s"):
            table.wait(0.0)
        addresses.append(stack.enter_context(ReplayShard(stores[1])).address)
        table.wait(20.0)
        assert list(table.present) == [0, 1]


def test_a_copy_in_another_process_connects_anew(served):
    table, _ = served("here", "away")
    with pickle.loads(pickle.dumps(table)) as copy:
        assert len(copy) == ROWS
    with ReplayShards(",".join(copy._source)) as copy:
        assert len(copy) == ROWS
    expected = select(table, SubSequences(1), 9, seed=0, draw=0).keys.indices
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # its requests do not mix with its parent's
        try:
            found = select(table, SubSequences(1), 9, seed=0, draw=0).keys.indices
            os.write(write, found.tobytes())
        finally:
            os._exit(0)
    os.close(write)
    for _ in range(20):
        select(table, SubSequences(1), 9, seed=0, draw=1)
    with os.fdopen(read, "rb") as pipe:
        np.testing.assert_array_equal(np.frombuffer(pipe.read(), np.int64), expected)
    os.waitpid(child, 0)


def test_only_who_knows_the_token_is_served(served):
    table, (shard, _) = served("away", "away")
    good = shard.address
    with pytest.raises(ReplayError, match="the token of the address is wrong"):
        ReplayShards([good[:-4] + "0000"])
    for text in ("http://a:1/b", "replay://a/b", "replay://a:99999/b", "replay://a:1/", ""):
        with pytest.raises(ReplayError, match="no address of a replay shard"):
            ReplayShards([text])
    with pytest.raises(ReplayError, match="no shard of a replay table can be reached: no address is known"):
        ReplayShards([])
    other = ReplayShard(ReplayStore.create(SCHEMA, 5), host_id="away")
    with other, pytest.raises(ReplayError, match="is of another table: its capacity is 5, the table's 15"):
        ReplayShards([good, other.address])
    with pytest.raises(ReplayError, match="no shard of a replay table can be reached: the replay shard at"):
        ReplayShards([other.address])
    assert len(table) == ROWS


@pytest.mark.parametrize(
    "text",
    [
        b"[",
        b"\xff",
        b'{"neither": 1}',
        b'{"array": ["<f8"]}',
        b'{"array": 5}',
        b'{"array": ["<f8", [0, 1%s]]}' % (b"0" * 30),
        b'{"array": ["<f8", [1e999]]}',
        b'{"array": ["<f8", [-1]]}',
        b'{"array": ["<M8[s]", [1]]}',
        b'{"array": [{"names": ["a"], "formats": ["O"]}, [1]]}',
        b'{"map": [[[], 1]]}',
        b'{"map": [1]}',
        b'{"array": ["|u1", [101]]}',  # more bytes than this reader takes
    ],
)
def test_a_text_that_is_no_message_is_an_error_of_the_connection(text):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(struct.pack("<4sI", b"RRS1", len(text)) + text)
        theirs.settimeout(20)
        with pytest.raises(WireError, match="the text of a message cannot be read"):
            receive(theirs, 1024, 100)


def test_a_peer_without_the_token_gets_no_memory_for_arrays(served):
    """The server would wait for the array's bytes."""
    _, (shard, _) = served("away", "away")
    port = int(shard.address.rpartition(":")[2].partition("/")[0])
    text = b'[{"array": ["|u1", [68719476736]]}, 2, "away"]'
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(5)  # the server's own limit is 10
        connection.sendall(struct.pack("<4sI", b"RRS1", len(text)) + text)
        assert connection.recv(1) == b""


def test_a_server_without_a_thread_for_a_client_serves_the_next(served, monkeypatch):
    _, (shard, _) = served("away", "away")
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "replay-shard-client":
            monkeypatch.setattr(threading.Thread, "start", start)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ReplayError, match="no shard of a replay table can be reached"):
        ReplayShards([shard.address])
    with ReplayShards([shard.address]) as table:
        assert len(table) == ROWS // 2


def test_a_store_of_this_host_that_may_not_be_opened_is_read_over_tcp(served, monkeypatch, caplog):
    """As one of another user."""

    def refuse(endpoint):
        raise ReplayError(f"the replay store at {endpoint!r} cannot be opened (Permission denied)")

    monkeypatch.setattr(ReplayStore, "attach", refuse)
    table, _ = served("here", "away")
    assert table.local == []
    assert "is read over TCP: the replay store at" in caplog.text
    assert gather(table, select(table, Uniform(), 40, seed=0, draw=0), WINDOWS).current.all()


def test_priorities_are_checked_before_any_shard_sets_some(served):
    table, _ = served("here", "away")
    before = table.status()["priority"].tolist()
    with pytest.raises(ReplayError, match=r"priorities are \[nan\]"):
        table.update_priorities(Keys(np.array([3, 25]), np.array([1, 1], np.uint64)), [5.0, np.nan])
    assert table.status()["priority"].tolist() == before


def test_a_forked_child_that_closes_the_table_leaves_its_parents_requests(served):
    table, _ = served("away", "away")
    request = table._members[0].remote.start("rows")
    child = os.fork()
    if child == 0:
        try:
            table.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert request.result() == ROWS // 2
    assert len(table) == ROWS


def test_shards_far_beyond_two_to_the_31_rows_are_drawn_from():
    """Rows of the last of 2**36 shards of 8 have indices of 39 bits."""
    last = 2**36 - 1
    store = ReplayStore.create(SCHEMA, 8, shard=last, num_shards=2**36)
    store.insert(content(range(8)))
    with ReplayShard(store, host_id="away") as shard, ReplayShards([shard.address], host_id="here") as table:
        found = select(table, Uniform(), 20, seed=0, draw=0)
        assert (found.keys.indices // 8 == last).all()
        assert gather(table, found, WINDOWS).current.all()


def test_a_row_that_has_lost_its_weight_during_a_draw_is_not_drawn():
    """Between the two questions of a draw, all weights but that of row 5 become 0."""
    stores = shards_of(8, 2, (Prioritized(),))

    class Changing(LocalShards):
        def ask(self, call, arguments):
            if call == "descend":
                for store in stores:
                    rows = Keys(store.base + np.arange(4), np.ones(4, np.uint64))
                    store.update_priorities(rows, np.where(rows.indices == 5, 1.0, 0.0))
            return super().ask(call, arguments)

    assert set(select(Changing(stores), Prioritized(), 30, seed=0, draw=0).keys.indices.tolist()) == {5}


def test_the_only_shard_draws_by_one_request():
    calls = []

    class Watched(LocalShards):
        def ask(self, call, arguments):
            calls.append(call)
            return super().ask(call, arguments)

    table = Watched(shards_of(8, 1, (Prioritized(),)))
    select(table, Prioritized(), 30, seed=0, draw=0)
    assert calls == ["draw"]


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<4sI", b"RRS1", 2**31),
        struct.pack("<4sI", b"RRS1", 6) + b"[1, 2]",
        struct.pack("<4sI", b"RRS1", 33) + b'{"array": ["<f8", [9223372036]] }',
        struct.pack("<4sI", b"RRS1", 22) + b'{"array":["|O",[1,1]]}',
        struct.pack("<4sI", b"RRS1", 600) + b"[" * 600,
        b"RRS",
    ],
)
def test_bytes_that_are_no_request_end_their_connection_only(served, data):
    table, (shard, _) = served("away", "away")
    port = int(shard.address.rpartition(":")[2].partition("/")[0])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(data)
        with suppress(OSError):  # refused while it is read
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1000):
                pass
    assert len(table) == ROWS


def test_requests_that_no_client_makes_are_refused(served):
    table, (shard, _) = served("away", "away")
    host, token = shard.address.removeprefix("replay://").split("/")
    with socket.create_connection((host.split(":")[0], int(host.split(":")[1]))) as connection:
        send(connection, [token, PROTOCOL, "away"])
        assert receive(connection)["rows"] == 15
        integers, reals = np.array([0]), np.array([0.5])
        for request in (
            ["eval", []],
            ["edges", [99]],
            ["edges", ["a"]],
            ["descend", [0, integers, np.array([10**9]), reals]],
            ["descend", [0, np.array([3]), integers, reals]],
            ["descend", [0, np.array([100]), integers, reals]],
            ["descend", [0, np.array([-1]), integers, reals]],
            ["descend", [0, np.array([1]), np.array([2**61]), reals]],
            ["descend", [0, integers, integers, np.zeros(10**6)]],
            ["descend", [0, np.zeros(0, np.int64), np.zeros(0, np.int64), reals]],
            ["draw", [0, 5, 0, 0, 0, 0]],  # of a table of two shards
            ["gather", [integers, np.array([1], np.uint64), integers, [["obs", 2**63 - 1, 5, "tail", ""]]]],
            ["mark", [np.array([99]), np.array([1], np.uint64)]],
            ["gather", [integers, np.array([1], np.uint64), integers, [["nothing", 0, 1, "tail", ""]]]],
            ["insert", [{}]],
            ["rows", [1, 2]],
        ):
            send(connection, request)
            assert "error" in receive(connection), request
    assert len(table) == ROWS


@pytest.mark.parametrize(
    "arguments",
    [[0, 0, 0, 0, 0, 0], [0, -1, 0, 0, 0, 0], [9, 5, 0, 0, 0, 0], [0, 5, 0], [0, 2**60, 0, 0, 0, 0]],
)
def test_draws_that_no_client_requests_are_refused(arguments):
    (store,) = shards_of(8, 1, (Prioritized(),))
    with ReplayShard(store, host_id="away") as shard:
        host, token = shard.address.removeprefix("replay://").split("/")
        with socket.create_connection((host.split(":")[0], int(host.split(":")[1]))) as connection:
            send(connection, [token, PROTOCOL, "away"])
            receive(connection)
            send(connection, ["draw", arguments])
            assert "error" in receive(connection)
            send(connection, ["rows", []])
            assert receive(connection)["result"] == 8


def test_a_closed_table_says_so_and_leaves_no_thread_or_descriptor(served):
    before = len(os.listdir("/proc/self/fd"))
    with ExitStack() as stack:
        store = stack.enter_context(ReplayStore.create(SCHEMA, 5))
        shard = stack.enter_context(ReplayShard(store))
        table = stack.enter_context(ReplayShards([shard.address]))
        table.insert(content([1]))
    with pytest.raises(ReplayError, match="these replay shards are closed"):
        len(table)
    del table, shard, store
    # The server's threads close their ends when they see that the client has closed its own.
    assert poll(lambda: len(os.listdir("/proc/self/fd")) <= before or None, 20.0)
