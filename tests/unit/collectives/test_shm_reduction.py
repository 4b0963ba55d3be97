import pytest
import torch

from collectives.transports.base import DTYPES, combine
from collectives.transports.shm.prepared_reductions import chunk_elements, chunks


def reduced(op, parts):
    out = torch.empty_like(parts[0])
    combine(parts, out, op)
    return out


def test_sums_run_in_rank_order():
    # float32 at 2^24 has a spacing of 2: (2^24 + 1) + 1 = 2^24, while 2^24 + (1 + 1) would be 2^24 + 2
    large, one = torch.tensor([2.0**24]), torch.tensor([1.0])
    assert reduced("sum", [large, one, one]).item() == 2.0**24
    assert reduced("sum", [one, one, large]).item() == 2.0**24 + 2


def test_bfloat16_is_summed_in_float32_and_rounded_once():
    # bfloat16 at 1 has a spacing of 2^-7: adding 2^-8 rounds back to 1 each time, their sum does not
    parts = [torch.tensor([1.0]), torch.tensor([2.0**-8]), torch.tensor([2.0**-8])]
    assert reduced("sum", [part.bfloat16() for part in parts]).item() == 1 + 2.0**-7


def test_the_mean_of_bfloat16_is_divided_before_it_is_rounded():
    # (128 + 197 + 197) / 128 = 522/128, and a third of it is 174/128 exactly. Rounded first (spacing 4/128 from 4 on)
    # the sum would be 520/128, a third of which is nearest to 173/128.
    parts = [torch.tensor([value / 128]).bfloat16() for value in (128, 197, 197)]
    assert reduced("mean", parts).item() == 174 / 128


def test_out_may_be_the_first_part():
    parts = [torch.tensor([1.0, 5.0]), torch.tensor([2.0, 4.0]), torch.tensor([3.0, 3.0])]
    for op, expected in (("max", [3.0, 5.0]), ("sum", [8.0, 12.0])):
        combine(parts, parts[0], op)
        assert parts[0].tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 3])
def test_nan_and_infinity_propagate(dtype, world_size):
    nan, inf = float("nan"), float("inf")
    first = torch.tensor([nan, 1.0, inf, -inf, inf], dtype=dtype)
    second = torch.tensor([1.0, nan, 1.0, 1.0, -inf], dtype=dtype)
    parts = [first, second] + [torch.zeros(5, dtype=dtype)] * (world_size - 2)
    total, largest = reduced("sum", parts), reduced("max", parts)
    assert total.isnan().tolist() == [True, True, False, False, True]
    assert total[2:4].tolist() == [inf, -inf]
    assert largest.isnan().tolist() == [True, True, False, False, False]
    assert largest[2:].tolist() == [inf, 1.0, inf]


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_cover_a_range_once_and_stay_below_torch_s_threads(dtype):
    size = chunk_elements("sum", dtype)
    assert size < 32768  # at::internal::GRAIN_SIZE
    assert size % 16 == 0
    covered = list(chunks(5, 100_003, size))
    assert [index for chunk in covered for index in range(chunk.start, chunk.stop)] == list(range(5, 100_003))
    assert all(chunk.stop - chunk.start <= size for chunk in covered)
