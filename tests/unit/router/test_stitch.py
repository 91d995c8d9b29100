"""The stitchers alone, on arbitrary chunkings: no event too large, no row lost, the row rule after every event."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import RoutingMissingError
from common.id_mask import unpack_ids
from common.routing.codec import numpy2base64
from common.routing.record import RoutingLayout
from common.sampling import Finish, FinishReason, SampledToken, SamplingParams, TokenLogprob
from router.choice import ReadChunk
from router.chunk import Chunk
from router.plan import Plan
from router.stitch import DeltaStitcher, FinalStitcher, Piece, Whole, base64_bytes, token_bytes

LENGTH = Finish(FinishReason.LENGTH)


def plan(prompt_len: int, start: int | None) -> Plan:
    return Plan(0, "r-0", range(prompt_len), SamplingParams(max_tokens=1), start)


def rows_of(layout: RoutingLayout, first: int, end: int) -> np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]:
    flat = np.arange(first * layout.row_bytes, end * layout.row_bytes) % 251
    return flat.astype(np.uint8).reshape(end - first, layout.num_layers, layout.top_k)


@st.composite
def choices(draw: st.DrawFn) -> tuple[Plan, RoutingLayout, list[Chunk]]:
    """A choice of any shape, and any way a worker may cut it into chunks."""
    layout = RoutingLayout(draw(st.integers(1, 5)), draw(st.integers(1, 4)), 8)
    prompt_len, num_tokens = draw(st.integers(1, 60)), draw(st.integers(1, 30))
    start = draw(st.integers(0, prompt_len))
    chunks, row = [], start
    for end in (
        sorted(draw(st.sets(st.integers(start, prompt_len - 1), max_size=5)) - {start}) if start < prompt_len else []
    ):
        chunks.append(Chunk(rows=rows_of(layout, row, end).tobytes(), num_rows=end - row))
        row = end
    cuts = sorted({*draw(st.sets(st.integers(1, num_tokens), max_size=6)), num_tokens})
    for first, last in zip([0, *cuts], cuts, strict=False):
        end = prompt_len + last - 1
        tokens = tuple(SampledToken(100 + i) for i in range(first, last))
        finish = LENGTH if last == num_tokens else None
        chunks.append(Chunk(tokens, rows_of(layout, row, end).tobytes(), end - row, finish))
        row = end
    return plan(prompt_len, start), layout, chunks


def size(piece: Piece) -> int:
    array = 0 if piece.rows_TLK is None else len(numpy2base64(piece.rows_TLK))
    return array + sum(len(f"{token.token_id},") for token in piece.tokens)


@given(choices(), st.integers(200, 2000))
def test_delta_pieces(choice: tuple[Plan, RoutingLayout, list[Chunk]], budget: int) -> None:
    planned, layout, chunks = choice
    stitcher = DeltaStitcher(planned, layout, budget, budget, token_bytes)
    pieces = [piece for chunk in chunks for piece in stitcher.feed(ReadChunk(chunk))]
    start = planned.routing_start or 0
    num_tokens = num_rows = 0
    for piece in pieces:
        num_tokens += len(piece.tokens)
        num_rows += 0 if piece.rows_TLK is None else len(piece.rows_TLK)
        assert num_tokens == 0 or num_rows == planned.prompt_len - start + num_tokens - 1
        assert piece.tokens or piece.rows_TLK is not None or piece.finish
        least = len(piece.tokens) <= 1 and (piece.rows_TLK is None or len(piece.rows_TLK) <= 1)
        assert size(piece) <= budget or least
    assert [piece.finish for piece in pieces] == [None] * (len(pieces) - 1) + [LENGTH]
    joined = np.concatenate([piece.rows_TLK for piece in pieces if piece.rows_TLK is not None])
    np.testing.assert_array_equal(joined, rows_of(layout, start, planned.prompt_len + num_tokens - 1))
    assert [t.token_id for piece in pieces for t in piece.tokens] == [100 + i for i in range(num_tokens)]


@given(choices())
def test_final_pieces_and_the_whole(choice: tuple[Plan, RoutingLayout, list[Chunk]]) -> None:
    planned, layout, chunks = choice
    final, whole = FinalStitcher(planned, layout), Whole(planned, layout)
    pieces = [piece for chunk in chunks for piece in final.feed(ReadChunk(chunk))]
    for chunk in chunks:
        whole.feed(ReadChunk(chunk))
    num_tokens = sum(len(chunk.tokens) for chunk in chunks)
    expected = rows_of(layout, planned.routing_start or 0, planned.prompt_len + num_tokens - 1)
    assert all(piece.rows_TLK is None for piece in pieces[:-1])
    np.testing.assert_array_equal(pieces[-1].rows_TLK, expected)
    np.testing.assert_array_equal(whole.piece().rows_TLK, expected)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 100, 100_000])
@pytest.mark.parametrize("num_experts", [8, 512, 100_000])
def test_size_of_an_encoded_array_is_known_beforehand(num_rows: int, num_experts: int) -> None:
    layout = RoutingLayout(48, 8, num_experts)
    if num_rows:
        assert len(numpy2base64(layout.empty(num_rows))) == base64_bytes(num_rows * layout.row_bytes)


def test_bound_of_a_tokens_size() -> None:
    longest = TokenLogprob(2**32 - 1, -1.2345678806304932e-38, 2**32 - 1)
    token = SampledToken(2**32 - 1, longest, (TokenLogprob(1, longest.logprob, longest.rank),) * 20)

    def json_bytes(token: SampledToken, text: str) -> int:
        """The token in the most talkative of the dialects' forms, with the text that it released."""
        logprobs = [{"token_id": t.token_id, "logprob": t.logprob, "rank": t.rank} for t in token.top]
        own = token.logprob and {"token_id": token.token_id, "logprob": token.logprob.logprob, "rank": 2**32 - 1}
        entry = [json.dumps({**own, "top_logprobs": [own, *logprobs]}, separators=(",", ":"))] if own else []
        mask = [f"{i}," for i in unpack_ids(token.mask or b"")]
        parts = [f"{token.token_id},", *mask, json.dumps(text)[1:-1], *entry]
        return sum(map(len, parts)) + 2

    for text in ("", "plain", "한👩‍👩‍👧\n\x00"):
        assert json_bytes(token, text) <= token_bytes(token, text)
        assert json_bytes(SampledToken(2**32 - 1, mask=b"\xff" * 36), text) <= token_bytes(
            SampledToken(2**32 - 1, mask=b"\xff" * 36), text
        )


@pytest.mark.parametrize("num_rows", [1, 3, 4])
def test_chunks_that_break_the_rule(num_rows: int) -> None:
    """A prompt of 2 and one token make 2 rows."""
    layout = RoutingLayout(1, 1, 8)
    chunk = Chunk((SampledToken(1),), bytes(num_rows), num_rows, LENGTH)
    with pytest.raises(RoutingMissingError):
        list(DeltaStitcher(plan(2, 0), layout, 1000, 1000, token_bytes).feed(ReadChunk(chunk)))
    with pytest.raises(RoutingMissingError):
        Whole(plan(2, 0), layout).feed(ReadChunk(chunk))


def test_rows_whose_bytes_do_not_fit() -> None:
    chunk = Chunk((SampledToken(1),), bytes(3), 2, LENGTH)
    with pytest.raises(RoutingMissingError, match="3 bytes of routing rows where 2 rows need 2"):
        Whole(plan(2, 0), RoutingLayout(1, 1, 8)).feed(ReadChunk(chunk))


def test_rows_that_nobody_asked_for() -> None:
    with pytest.raises(RoutingMissingError):
        Whole(plan(2, None), RoutingLayout(1, 1, 8)).feed(ReadChunk(Chunk((), bytes(1), 1)))
