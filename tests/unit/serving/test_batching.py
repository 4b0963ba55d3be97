"""Order of requests and their pieces, with recording policies on a real event loop and thread."""

import asyncio
import json
import threading
import time
from contextlib import asynccontextmanager

import numpy as np
import pytest

from rayagi.serving.policy_server.batching import FairBatcher, ServerStatistics
from rayagi.serving.policy_server.requests import PIECE_ROWS, Expected, RequestError

LIMIT_S = 60
LARGE = 64 * PIECE_ROWS
"""Rows of a request of more than PIECE_BYTES, in pieces of PIECE_ROWS (of 16 bytes of JSON, or 8)."""


class Doubling:
    """Doubles its observations, and records the batches by the values of their rows. Waits while it is held."""

    def __init__(self, version=7):
        self.version, self.batches = version, []
        self.called, self.released = threading.Event(), threading.Event()
        self.released.set()

    def act(self, obs):
        self.batches.append(obs[:, 0].tolist())
        self.called.set()
        assert self.released.wait(LIMIT_S)
        if (obs < 0).any():
            raise ValueError("below zero")
        return 2 * obs


@asynccontextmanager
async def batching(policy):
    batcher = FairBatcher(
        policy if callable(policy) else lambda: policy,
        Expected(obs_dim=2, max_rows=LARGE),
        ServerStatistics(),
    )
    try:
        yield batcher
    finally:
        batcher.close(LIMIT_S)
        assert not batcher._thread.is_alive()


@asynccontextmanager
async def held(policy, batcher):
    """The first piece of a request of one row is being served until the context ends."""
    policy.called.clear()
    policy.released.clear()
    task = ask(batcher, "holder", rows(0))
    assert await asyncio.to_thread(policy.called.wait, LIMIT_S)
    try:
        yield
        await arrival()
    finally:
        policy.released.set()
    await task


async def arrival():
    """Until the requests that were asked have arrived."""
    for _ in range(10):
        await asyncio.sleep(0)


def rows(value, count=1):
    return np.full((count, 2), value, dtype="<f4")


def ask(batcher, client, obs, body_format="raw", order=None):
    """A request's task; the value of its first row goes to ``order`` when it is answered."""
    body = obs.tobytes() if body_format == "raw" else json.dumps({"obs": obs.tolist()}).encode()
    task = asyncio.create_task(batcher.answer(client, body, body_format, time.perf_counter()))
    if order is not None:
        task.add_done_callback(lambda _: order.append(obs[0, 0]))
    return task


async def asked(batcher, client, obs):
    answer = await asyncio.wait_for(ask(batcher, client, obs), LIMIT_S)
    return np.frombuffer(answer.body, "<f4").reshape(-1, 2), answer.version


def test_waiting_requests_share_one_inference_and_get_their_own_rows():
    policy = Doubling()

    async def main():
        async with batching(policy) as batcher:
            async with held(policy, batcher):
                tasks = [ask(batcher, number, rows(number, number)) for number in (1, 2, 3)]
            for number, answer in zip((1, 2, 3), await asyncio.gather(*tasks), strict=True):
                assert np.frombuffer(answer.body, "<f4").tolist() == rows(2 * number, number).ravel().tolist()
                assert answer.version == 7
            return batcher._statistics.to_dict()

    counted = asyncio.run(main())
    assert policy.batches == [[0], [1, 2, 2, 3, 3, 3]]
    assert (counted["requests"], counted["rows"], counted["batches"]) == (4, 7, 2)
    assert counted["requests_per_batch"] == 2
    assert counted["latency"]["count"] == 4


@pytest.mark.parametrize("body_format", ["raw", "json"])
def test_a_small_request_waits_for_the_piece_in_service_only(body_format):
    """Large requests take turns; small ones come before their next pieces, though they arrived last."""
    policy, order = Doubling(), []

    async def main():
        async with batching(policy) as batcher:
            async with held(policy, batcher):
                large = [ask(batcher, number, rows(number, LARGE), body_format, order) for number in (1, 2)]
                small = [ask(batcher, number, rows(number), body_format, order) for number in (3, 4)]
            await asyncio.gather(*large, *small)

    asyncio.run(main())
    turns = [{number} for _ in range(len(policy.batches) // 2 - 1) for number in (1, 2)]
    assert [set(batch) for batch in policy.batches] == [{0}, {3, 4}, *turns]
    assert max(map(len, policy.batches)) == PIECE_ROWS
    assert order == [3, 4, 1, 2]


def test_a_small_request_that_arrives_during_a_piece_comes_next():
    policy, order = Doubling(), []

    async def main():
        async with batching(policy) as batcher:
            policy.released.clear()
            large = ask(batcher, 1, rows(1, LARGE), order=order)
            assert await asyncio.to_thread(policy.called.wait, LIMIT_S)
            small = ask(batcher, 2, rows(2), order=order)
            await arrival()
            policy.released.set()
            await asyncio.gather(large, small)

    asyncio.run(main())
    assert [batch[0] for batch in policy.batches[:3]] == [1, 2, 1]
    assert order == [2, 1]


def test_small_requests_leave_half_of_the_pieces_to_large_ones():
    """Small requests of a whole piece each: they and the large request take turns."""
    policy = Doubling()

    async def main():
        async with batching(policy) as batcher:
            async with held(policy, batcher):
                tasks = [ask(batcher, 1, rows(1, LARGE))]
                tasks += [ask(batcher, number, rows(number, PIECE_ROWS)) for number in range(2, 6)]
            await asyncio.gather(*tasks)

    asyncio.run(main())
    assert [batch[0] for batch in policy.batches[1:9]] == [2, 1, 3, 1, 4, 1, 5, 1]


def test_a_client_has_one_request_in_service_and_those_of_others_come_in_between():
    policy, order = Doubling(), []

    async def main():
        async with batching(policy) as batcher:
            async with held(policy, batcher):
                tasks = [
                    ask(batcher, "greedy", rows(number, PIECE_ROWS), order=order) for number in (1, 2, 3)
                ]
                tasks.append(ask(batcher, "modest", rows(9), order=order))
            await asyncio.gather(*tasks)

    asyncio.run(main())
    # 9 is the next after 1; there is room for the first rows of 2 in the same inference.
    assert [[batch[0], batch[-1]] for batch in policy.batches] == [[0, 0], [1, 1], [9, 2], [3, 3]]
    assert order == [1, 9, 2, 3]


@pytest.mark.parametrize("count", [1, PIECE_ROWS - 1, PIECE_ROWS, PIECE_ROWS + 1, 5 * PIECE_ROWS + 3])
@pytest.mark.parametrize("body_format", ["raw", "json"])
def test_the_answer_of_many_pieces_is_that_of_the_whole_request(count, body_format):
    policy = Doubling()
    obs = np.random.default_rng(count).random((count, 2)).astype("<f4")

    async def main():
        async with batching(policy) as batcher:
            return await ask(batcher, 1, obs, body_format)

    body = asyncio.run(main()).body
    found = (
        json.loads(body)["actions"] if body_format == "json" else np.frombuffer(body, "<f4").reshape(-1, 2)
    )
    assert (np.float32(found) == 2 * obs).all()
    assert len(policy.batches) == -(-count // PIECE_ROWS)


def test_one_policy_answers_all_pieces_of_a_request():
    policies = [Doubling(1), Doubling(2)]
    current = [policies[0]]

    async def main():
        async with batching(lambda: current[0]) as batcher:
            policies[0].released.clear()
            large = ask(batcher, 1, rows(1, 3 * PIECE_ROWS))
            assert await asyncio.to_thread(policies[0].called.wait, LIMIT_S)
            current[0] = policies[1]
            small = ask(batcher, 2, rows(2))
            await asyncio.sleep(0)
            policies[0].released.set()
            return (await large).version, (await small).version

    assert asyncio.run(main()) == (1, 2)
    assert [[len(batch) for batch in policy.batches] for policy in policies] == [[PIECE_ROWS] * 3, [1]]


def test_a_failing_policy_is_an_error_for_the_request_that_it_fails_on():
    policy = Doubling()

    async def main():
        async with batching(policy) as batcher:
            async with held(policy, batcher):
                tasks = [ask(batcher, number, rows(value)) for number, value in enumerate((-1, 1, 5))]
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            assert (str(answers[0]), answers[0].status) == ("the policy failed: below zero", 500)
            for answer, value in zip(answers[1:], (1, 5), strict=True):
                assert np.frombuffer(answer.body, "<f4").tolist() == [2 * value] * 2
            late = np.concatenate((rows(1, 2 * PIECE_ROWS), rows(-1)))  # fails in the last piece
            with pytest.raises(RequestError, match="below zero"):
                await asked(batcher, 1, late)
            return await asked(batcher, 1, rows(4))

    assert asyncio.run(main())[0].tolist() == [[8, 8]]


def test_an_invalid_request_leaves_the_others_of_its_batch_and_of_its_client_alone():
    policy = Doubling()

    async def main():
        async with batching(policy) as batcher:
            async with held(policy, batcher):
                tasks = [ask(batcher, 1, rows(1)), ask(batcher, 2, rows(np.nan)), ask(batcher, 2, rows(2))]
            return await asyncio.gather(*tasks, return_exceptions=True)

    first, refused, second = asyncio.run(main())
    assert isinstance(refused, RequestError)
    assert np.frombuffer(first.body, "<f4").tolist() == [2, 2]
    assert np.frombuffer(second.body, "<f4").tolist() == [4, 4]


@pytest.mark.parametrize("body_format", ["json", "raw"])
def test_a_policy_whose_answer_is_not_finite_answers_with_an_error(body_format):
    class Diverged(Doubling):
        def act(self, obs):
            return np.where(obs == 1, np.nan, super().act(obs))

    async def main():
        async with batching(Diverged()) as batcher:
            with pytest.raises(RequestError, match="actions for these observations are not finite") as caught:
                await ask(batcher, 1, rows(1), body_format)
            assert caught.value.status == 500
            answer, _ = await asked(batcher, 1, rows(2))
            return answer.tolist(), batcher._statistics.requests, batcher._statistics.rows

    assert asyncio.run(main()) == ([[4, 4]], 1, 2)


def test_a_policy_with_a_wrong_number_of_answers_does_not_end_the_thread():
    class Short(Doubling):
        def act(self, obs):
            return obs[:-1] if obs[0, 0] == 1 else super().act(obs)

    async def main():
        async with batching(Short()) as batcher:
            with pytest.raises(RequestError, match="no actions for 1 observation"):
                await asked(batcher, 1, rows(1))
            return await asked(batcher, 1, rows(2))

    assert asyncio.run(main())[0].tolist() == [[4, 4]]


def test_a_disconnected_client_is_left_out_and_its_large_request_ends():
    policy = Doubling()

    async def main():
        async with batching(policy) as batcher:
            policy.released.clear()
            gone = ask(batcher, 1, rows(1, 9 * PIECE_ROWS))
            assert await asyncio.to_thread(policy.called.wait, LIMIT_S)
            also_gone, stays = ask(batcher, 1, rows(3)), ask(batcher, 2, rows(2))
            await asyncio.sleep(0)
            gone.cancel()
            also_gone.cancel()
            await asyncio.sleep(0)
            policy.released.set()
            await stays
            for task in (gone, also_gone):
                with pytest.raises(asyncio.CancelledError):
                    await task
            return await asked(batcher, 1, rows(4))

    assert asyncio.run(main())[0].tolist() == [[8, 8]]
    assert [batch[0] for batch in policy.batches] == [1, 2, 4]
