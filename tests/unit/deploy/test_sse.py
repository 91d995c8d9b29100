"""The event stream decoder."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from deploy.sse import SseDecoder

PAYLOADS = ['{"a": 1}', "é" * 300, "[DONE]"]
STREAM = b"".join(f"data: {payload}\n\n".encode() for payload in PAYLOADS)


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_payloads_do_not_depend_on_how_the_bytes_arrive(cuts: list[int]) -> None:
    decoder = SseDecoder()
    edges = [0, *sorted(cuts), len(STREAM)]
    got = [p for begin, end in pairwise(edges) for p in decoder.feed(STREAM[begin:end])]
    assert got == PAYLOADS
    assert decoder.is_empty


def test_comments_are_skipped_and_a_cut_event_is_not_an_event() -> None:
    decoder = SseDecoder()
    assert list(decoder.feed(b": ping\n\ndata: 1\n\ndata: 2\n")) == ["1"]
    assert not decoder.is_empty
