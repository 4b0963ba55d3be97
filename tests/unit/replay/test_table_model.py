"""A table of shards against a model in plain Python: writes, draws, losses and returns in any order, for 1 to 5 shards."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from replay_tables import LENGTH, SCHEMA, content

from actors.replay import (
    Fifo,
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
    WithoutReplacement,
    gather,
    select,
    select_centralised,
)
from actors.replay.kernel import COMMITTED, DELETED, FREE, WRITING

ROWS = 30
"""Of the table: 30, 15, 10 or 6 in a shard."""
SELECTORS = (
    Uniform(),
    SubSequences(2),
    Prioritized(0.7, 0.5),
    Fifo(),
    TopK(),
    WithoutReplacement(),
    WithoutReplacement(0.7),
)


class ShardModel:
    """State, number, length and priority of each row of one shard, and the queue of free indices."""

    def __init__(self, capacity, incarnation=0):
        self.rows = [{"state": FREE, "generation": incarnation << 40} for _ in range(capacity)]
        self.queue, self.order = list(range(capacity)), []

    def allocate(self):
        index = self.queue.pop(0) if self.queue else self.order.pop(0)
        self.rows[index] = {"state": WRITING, "generation": self.rows[index]["generation"] + 1}
        return index

    def commit(self, index, number, length, priority):
        self.rows[index] |= {
            "state": COMMITTED, "number": number, "length": length, "priority": priority, "sampled": 0
        }  # fmt: skip
        self.order.append(index)

    def free(self, index, state):
        self.rows[index]["state"] = state
        self.queue.append(index)
        if index in self.order:
            self.order.remove(index)


class TableMachine(RuleBasedStateMachine):
    """All rows of one table, in real stores of which a reader has some in place and asks the others over TCP."""

    @initialize(num_shards=st.sampled_from([1, 2, 3, 5]), away=st.integers(0, 31))
    def create(self, num_shards, away):
        self.capacity, self.number, self.draw = ROWS // num_shards, 0, 0
        self.hosts = ["away" if away >> shard & 1 else "here" for shard in range(num_shards)]
        self.shards, self.reserved = {}, {}
        self.incarnations = [0] * num_shards
        self.models = [ShardModel(self.capacity) for _ in range(num_shards)]
        for shard in range(num_shards):
            self.start(shard)
        self.table = ReplayShards(
            lambda: [shard.address for shard in self.shards.values()], host_id="here", timeout_s=30
        )

    def start(self, shard):
        store = ReplayStore.create(
            SCHEMA,
            self.capacity,
            selectors=SELECTORS,
            shard=shard,
            num_shards=len(self.hosts),
            incarnation=self.incarnations[shard],
        )
        self.shards[shard] = ReplayShard(store, host_id=self.hosts[shard])

    def present(self, data):
        return data.draw(st.sampled_from(sorted(self.shards)))

    def committed(self):
        """Global index and row of everything that can be selected."""
        return {
            shard * self.capacity + index: self.models[shard].rows[index]
            for shard in sorted(self.shards)
            for index in sorted(self.models[shard].order)
        }

    def key(self, data):
        """A committed row's, or one that fits no row."""
        rows = self.committed()
        index = data.draw(st.sampled_from(sorted(rows)))
        wrong = data.draw(st.booleans())
        return index, Keys(np.array([index]), np.array([rows[index]["generation"] - wrong], np.uint64)), wrong

    @precondition(lambda self: self.shards)
    @rule(data=st.data(), count=st.integers(1, 3), length=st.integers(1, LENGTH), priority=st.integers(0, 4))
    def insert(self, data, count, length, priority):
        shard = self.present(data)
        numbers = list(range(self.number, self.number + count))
        keys = self.table.insert(content(numbers), [length] * count, float(priority), numbers, shard=shard)
        model = self.models[shard]
        indices = [model.allocate() for _ in numbers]
        assert sorted(keys.indices - shard * self.capacity) == sorted(indices)
        for index, number in zip(keys.indices - shard * self.capacity, numbers, strict=True):
            model.commit(int(index), number, length, float(priority))
        self.number += count

    @precondition(lambda self: self.shards)
    @rule(data=st.data())
    def reserve(self, data):
        shard = self.present(data)
        if len(self.reserved.get(shard, ())) < 3:
            row = self.shards[shard].store.allocate()
            self.reserved.setdefault(shard, []).append((row, self.models[shard].allocate()))

    @precondition(lambda self: any(self.reserved.values()))
    @rule(data=st.data(), length=st.integers(1, LENGTH), priority=st.integers(0, 4), commits=st.booleans())
    def commit_or_cancel(self, data, length, priority, commits):
        shard = data.draw(st.sampled_from(sorted(shard for shard, rows in self.reserved.items() if rows)))
        row, index = self.reserved[shard].pop()
        if not commits:
            row.cancel()
            self.models[shard].free(index, FREE)
            return
        for column, block in content([self.number]).items():
            row[column][:] = block[0]
        row.commit(length, float(priority), self.number)
        self.models[shard].commit(index, self.number, length, float(priority))
        self.number += 1

    @precondition(lambda self: self.committed())
    @rule(data=st.data())
    def delete(self, data):
        index, keys, wrong = self.key(data)
        assert self.table.delete(keys) == 1 - wrong
        if not wrong:
            self.models[index // self.capacity].free(index % self.capacity, DELETED)

    @precondition(lambda self: self.committed())
    @rule(data=st.data(), priority=st.integers(0, 4))
    def update(self, data, priority):
        index, keys, wrong = self.key(data)
        assert self.table.update_priorities(keys, float(priority)) == 1 - wrong
        if not wrong:
            self.committed()[index]["priority"] = float(priority)

    @rule(selector=st.sampled_from(SELECTORS), centralised=st.booleans(), k=st.integers(1, 4))
    def sample(self, selector, centralised, k):
        """The list is that of one store with the same rows, and the batch has the rows' content."""
        self.draw += 1
        choose, rows = select_centralised if centralised else select, self.committed()
        try:
            expected = select(self.whole(rows), selector, k, seed=3, draw=self.draw)
        except ReplayError:
            with pytest.raises(ReplayError):
                choose(self.table, selector, k, seed=3, draw=self.draw)
            return
        chosen = choose(self.table, selector, k, seed=3, draw=self.draw)
        for name in ("steps", "probabilities", "weights", "lengths"):
            np.testing.assert_array_equal(getattr(chosen, name), getattr(expected, name))
        np.testing.assert_array_equal(chosen.keys.indices, expected.keys.indices)
        batch = gather(self.table, chosen, [Subscription(column="obs")])
        assert batch.current.all()
        numbers = [rows[int(index)]["number"] for index in chosen.keys.indices]
        np.testing.assert_array_equal(batch.values["obs"][:, 0], 100 * np.array(numbers) + chosen.steps)
        for index in chosen.keys.indices:
            rows[int(index)]["sampled"] += 1

    def whole(self, rows):
        """One store that has these rows at their global indices."""
        store = ReplayStore.create(SCHEMA, ROWS, selectors=SELECTORS)
        reserved = {row._index: row for row in (store.allocate() for _ in range(ROWS))}
        for index, found in rows.items():
            reserved.pop(index).commit(found["length"], found["priority"], found["number"])
        for row in reserved.values():
            row.cancel()
        return store

    @precondition(lambda self: self.shards)
    @rule(data=st.data())
    def lose(self, data):
        shard = self.present(data)
        for row, _ in self.reserved.pop(shard, ()):
            row.cancel()
        self.shards.pop(shard).close()
        self.incarnations[shard] += 1
        self.models[shard] = ShardModel(self.capacity, self.incarnations[shard])
        with pytest.raises(ShardLostError):
            self.table.insert(content([0]), shard=shard)

    @precondition(lambda self: len(self.shards) < len(self.hosts))
    @rule(data=st.data())
    def join(self, data):
        shard = data.draw(st.sampled_from(sorted(set(range(len(self.hosts))) - self.shards.keys())))
        self.start(shard)
        assert shard in self.table.join()

    @invariant()
    def status_is_the_models(self):
        if not hasattr(self, "table"):
            return
        assert list(self.table.present) == sorted(self.shards)
        assert len(self.table) == len(self.committed())
        status = self.table.status()
        rows = [row for shard in sorted(self.shards) for row in self.models[shard].rows]
        assert len(status) == len(rows)
        for name in ("state", "generation"):
            assert status[name].tolist() == [row[name] for row in rows]
        live = status["state"] == COMMITTED
        for name in ("length", "priority", "sampled"):
            expected = [row[name] for row in rows if row["state"] == COMMITTED]
            assert status[name][live].tolist() == expected

    def teardown(self):
        if hasattr(self, "table"):
            self.table.close()
            for shard in self.shards.values():
                shard.close()


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)
