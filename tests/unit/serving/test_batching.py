"""Batching of requests, with a counting policy on a real event loop."""

import asyncio

import numpy as np
import pytest

from rayagi.serving.policy_server.batching import MicroBatcher, ServerStatistics
from rayagi.serving.policy_server.requests import RequestError


class Doubling:
    """Doubles its observations, and records the batches."""

    def __init__(self):
        self.batches = []

    def __call__(self, obs):
        self.batches.append(len(obs))
        if (obs < 0).any():
            raise ValueError("below zero")
        return 2 * obs, 7


def batcher(act, *, max_wait_s=0.0, max_rows=100):
    return MicroBatcher(act, max_wait_s=max_wait_s, max_rows=max_rows, statistics=ServerStatistics())


def rows(value, count=1):
    return np.full((count, 2), value, dtype=np.float32)


def test_pending_requests_share_one_inference_and_get_their_own_rows():
    act = Doubling()

    async def ask():
        own = batcher(act)
        return own, await asyncio.gather(*(own.actions(rows(number, count=number)) for number in (1, 2, 3)))

    own, answers = asyncio.run(ask())
    assert act.batches == [6]
    for number, (actions, version) in zip((1, 2, 3), answers, strict=True):
        assert actions.tolist() == [[2 * number] * 2] * number
        assert version == 7
    counted = own._statistics.to_dict()
    assert (counted["requests"], counted["rows"], counted["batches"]) == (3, 6, 1)
    assert counted["requests_per_batch"] == 3
    assert counted["latency"]["count"] == 3


def test_a_single_client_never_waits():
    """Even if the maximum wait is an hour."""

    async def ask():
        own = batcher(Doubling(), max_wait_s=3600.0)
        for _ in range(5):
            await asyncio.wait_for(own.actions(rows(1)), timeout=30)

    asyncio.run(ask())


def test_a_batch_waits_for_as_many_requests_as_the_last_one_within_the_limit():
    act = Doubling()

    async def ask():
        own = batcher(act, max_wait_s=0.05)
        await asyncio.gather(*(own.actions(rows(1)) for _ in range(3)))
        late = asyncio.gather(own.actions(rows(1)), own.actions(rows(1)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert act.batches == [3]  # the two wait for a third
        await own.actions(rows(1))  # the third one
        await late
        assert act.batches == [3, 3]
        await asyncio.wait_for(own.actions(rows(1)), timeout=30)  # no other request follows
        assert act.batches == [3, 3, 1]
        await asyncio.wait_for(own.actions(rows(1)), timeout=30)
        assert act.batches == [3, 3, 1, 1]

    asyncio.run(ask())


def test_rows_beyond_the_maximum_go_to_the_next_inference():
    act = Doubling()

    async def ask():
        own = batcher(act, max_rows=5)
        await asyncio.gather(*(own.actions(rows(1, count=count)) for count in (3, 2, 4, 5)))

    asyncio.run(ask())
    assert act.batches == [5, 4, 5]


def test_a_failing_policy_is_an_error_for_each_request_of_the_batch():
    act = Doubling()

    async def ask():
        own = batcher(act)
        answers = await asyncio.gather(own.actions(rows(-1)), own.actions(rows(1)), return_exceptions=True)
        assert [str(error) for error in answers] == ["the policy failed: below zero"] * 2
        assert all(isinstance(error, RequestError) and error.status == 500 for error in answers)
        return await own.actions(rows(4))

    actions, _ = asyncio.run(ask())
    assert actions.tolist() == [[8, 8]]


def test_a_disconnected_client_is_left_out_of_the_batch():
    act = Doubling()

    async def ask():
        own = batcher(act)
        gone = asyncio.create_task(own.actions(rows(1)))
        stays = asyncio.create_task(own.actions(rows(2)))
        await asyncio.sleep(0)
        gone.cancel()
        actions, _ = await stays
        with pytest.raises(asyncio.CancelledError):
            await gone
        return actions

    assert asyncio.run(ask()).tolist() == [[4, 4]]
    assert act.batches == [1]
