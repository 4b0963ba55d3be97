import pytest
import torch

from collectives.transports import calls
from collectives.transports.calls import ON_DEVICE, encode_call


@pytest.mark.parametrize(
    ("word", "text"),
    [
        (encode_call("barrier"), "barrier"),
        (encode_call("connect"), "connect"),
        (encode_call("all_reduce", 2, torch.float32, 7), "all_reduce(max) of 7 float32"),
        (encode_call("reduce", 0, torch.bfloat16, 1, 254), "reduce(sum) of 1 bfloat16 in buffer 254"),
        (
            encode_call("reduce_scatter", 1, torch.float64, 0, 1),
            "reduce_scatter(mean) of 0 float64 in buffer 1",
        ),
        (encode_call("all_gather", 0, torch.int64, 2**37 - 1), "all_gather of 137438953471 int64"),
        (
            encode_call("broadcast", 255, torch.uint8, 3, ON_DEVICE),
            "broadcast(source=255) of 3 uint8 on a device",
        ),
        (encode_call("buffer", 0, torch.float32, 12), "buffer of 12 float32"),
    ],
)
def test_a_word_says_what_was_called(word, text):
    assert 0 <= word < 2**64
    assert calls.describe_call(word) == text


def test_words_of_different_calls_differ():
    words = [
        encode_call(call, detail, dtype, numel, place)
        for call in calls.CALLS
        for detail in (0, 1, 255)
        for dtype in (torch.float32, torch.bfloat16)
        for numel in (0, 1, 2**37 - 1)
        for place in (0, 1, 255)
    ]
    assert len(set(words)) == len(words)
