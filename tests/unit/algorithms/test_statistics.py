from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collectives.solo import SoloCommunicator
from rayagi.algorithms.normalisers import Moments, all_merge, merged
from tests.threads import in_threads, unfailed
from tests.unit.collectives.thread_group import ThreadGroup

reals = st.floats(min_value=-1e6, max_value=1e6, allow_nan=False, width=64)


def assert_close(a: Moments, b: Moments, scale: float = 1.0) -> None:
    assert a.count == b.count
    torch.testing.assert_close(a.mean, b.mean, rtol=1e-10, atol=1e-10 * scale)
    torch.testing.assert_close(a.m2, b.m2, rtol=1e-8, atol=1e-10 * scale**2)


def test_moments_by_hand():
    moments = Moments.from_batch(torch.tensor([[1.0, 10.0], [2.0, 10.0], [6.0, 10.0]]))
    assert moments.count == 3
    assert moments.mean.tolist() == [3.0, 10.0]
    assert moments.m2.tolist() == [14.0, 0.0]  # 4 + 1 + 9
    assert moments.variance().tolist() == pytest.approx([14 / 3, 0.0])
    assert moments.mean.dtype == torch.float64


def test_two_parts_merged_by_hand():
    union = merged(Moments.from_batch(torch.tensor([1.0, 3.0])), Moments.from_batch(torch.tensor([8.0])))
    # mean 4; deviations -3, -1, 4
    assert (union.count, union.mean, union.m2) == (3, 4.0, 26.0)


def test_nothing_is_neutral_on_both_sides():
    some = Moments.from_batch(torch.tensor([[1.5, -2.0], [4.0, 8.0]]))
    nothing = Moments.empty((2,))
    assert_close(merged(nothing, some), some)
    assert_close(merged(some, nothing), some)
    assert Moments.from_batch(torch.empty((0, 2))).mean.shape == (2,)
    assert merged(nothing, nothing).variance().tolist() == [0.0, 0.0]


@given(st.lists(reals, min_size=1, max_size=40))
def test_variance_is_that_of_torch_in_float64(values):
    batch = torch.tensor(values, dtype=torch.float64)
    torch.testing.assert_close(
        Moments.from_batch(batch).variance(), batch.var(correction=0), rtol=1e-9, atol=1e-9 * 1e6
    )


@given(st.lists(reals, min_size=2, max_size=40), st.data())
def test_any_split_merges_to_the_whole(values, data):
    cuts = sorted(
        data.draw(st.lists(st.integers(min_value=0, max_value=len(values)), min_size=1, max_size=4))
    )
    batch = torch.tensor(values, dtype=torch.float64)
    union = Moments.empty()
    for begin, end in zip([0, *cuts], [*cuts, len(values)], strict=True):
        union = merged(union, Moments.from_batch(batch[begin:end]))
    assert_close(union, Moments.from_batch(batch), scale=1e6)


def test_a_large_mean_does_not_swallow_a_small_variance():
    batch = 1e8 + torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    union = merged(Moments.from_batch(batch[:2]), Moments.from_batch(batch[2:]))
    assert union.variance().item() == pytest.approx(1.25, rel=1e-6)


def test_all_members_get_bitwise_the_same_union():
    batch = torch.randn(30, 5, generator=torch.Generator().manual_seed(3))
    group = ThreadGroup.on_one_device(3)

    def member(rank: int) -> Moments:
        with group.communicator(rank) as communicator:
            return all_merge(Moments.from_batch(batch[10 * rank : 10 * rank + 10]), communicator)

    results = unfailed(in_threads([partial(member, rank) for rank in range(3)]))
    assert_close(results[0], Moments.from_batch(batch))
    for rank in (1, 2):
        assert torch.equal(results[rank].mean, results[0].mean)
        assert torch.equal(results[rank].m2, results[0].m2)


def test_alone_all_merge_changes_nothing():
    moments = Moments.from_batch(torch.randn(7, 2, 3, generator=torch.Generator().manual_seed(0)))
    union = all_merge(moments, SoloCommunicator())
    assert union.mean.shape == (2, 3)
    assert torch.equal(union.m2, moments.m2)
