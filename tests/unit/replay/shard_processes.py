"""Shards in processes of their own, which tests kill."""

import os
import signal

from replay_tables import SCHEMA, SELECTORS, content

from actors.replay import ReplayShard, ReplayStore


class ShardProcess:
    """A forked process with one shard, filled with rows that have their global index as their number."""

    def __init__(self, capacity, shard, num_shards, *, host_id, incarnation=0, filled=True):
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                store = ReplayStore.create(
                    SCHEMA,
                    capacity,
                    selectors=SELECTORS,
                    shard=shard,
                    num_shards=num_shards,
                    incarnation=incarnation,
                )
                if filled:
                    store.insert(content(range(shard * capacity, (shard + 1) * capacity)), priorities=2.0)
                served = ReplayShard(store, host_id=host_id)
                os.write(write, served.address.encode())
                signal.pause()
            finally:
                os._exit(1)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            self.address = pipe.read1().decode()

    def kill(self):
        """End it now. Safe to call twice."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
