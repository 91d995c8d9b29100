"""The reader of one choice: which of its tokens are text, and where it ends."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.sampling import Finish, FinishReason, SampledToken, SamplingParams
from router.choice import ChoiceReader, ReadChunk
from router.chunk import Chunk
from router.plan import Plan, TextOptions
from router.text.stop import StopStrings
from router.text.tokenizer import Tokenizer
from tests.unit.router.text.conftest import Pair, byte_level  # noqa: F401  # a fixture


@pytest.fixture
def tokenizer(byte_level: Pair) -> Tokenizer:  # noqa: F811
    return byte_level.loaded


def reader(tokenizer: Tokenizer, *stops: str, include: bool = False) -> ChoiceReader:
    text = TextOptions(shown=True, stops=StopStrings(stops, include=include))
    return ChoiceReader(Plan(0, "r", [1, 2], SamplingParams(max_tokens=9), None, text), tokenizer)


def tokens(tokenizer: Tokenizer, text: str) -> tuple[SampledToken, ...]:
    return tuple(SampledToken(i, weight_version="7") for i in tokenizer.encode(text, False))


def text_of(reads: Sequence[ReadChunk]) -> str:
    return "".join("".join(read.texts) + read.tail for read in reads)


@pytest.mark.parametrize(("include", "shown"), [(False, "ab"), (True, "abX")])
def test_a_stop_token_is_text_only_if_asked_for(tokenizer: Tokenizer, include: bool, shown: str) -> None:
    """vLLM leaves out the token that ended the request by its id, unless include_stop_str_in_output."""
    x = tokens(tokenizer, "X")[0]
    one = reader(tokenizer, include=include)
    reads = [
        one.read(Chunk(tokens(tokenizer, "ab"))),
        one.read(Chunk((x,), finish=Finish(FinishReason.STOP, x.token_id))),
    ]
    assert text_of(reads) == shown
    assert (reads[-1].chunk.tokens, one.ended, one.versions.spans[0][1]) == (
        (x,),
        True,
        sum(len(r.chunk.tokens) for r in reads),
    )


def test_a_stop_token_completes_no_stop_string(tokenizer: Tokenizer) -> None:
    x = tokens(tokenizer, "X")[0]
    one = reader(tokenizer, "aX")
    reads = [
        one.read(Chunk(tokens(tokenizer, "a"))),
        one.read(Chunk((x,), finish=Finish(FinishReason.STOP, x.token_id))),
    ]
    assert (text_of(reads), reads[-1].chunk.finish) == ("a", Finish(FinishReason.STOP, x.token_id))


def test_the_last_token_of_a_full_answer_is_text(tokenizer: Tokenizer) -> None:
    one = reader(tokenizer)
    assert text_of([one.read(Chunk(tokens(tokenizer, "aX"), finish=Finish(FinishReason.LENGTH)))]) == "aX"


def test_an_aborted_choice_gives_up_what_was_held_back(tokenizer: Tokenizer) -> None:
    one = reader(tokenizer, "abc")
    reads = [one.read(Chunk(tokens(tokenizer, "ab"))), one.read(Chunk(finish=Finish(FinishReason.ABORT)))]
    assert ["".join(read.texts) for read in reads] == ["", ""]
    assert reads[-1].tail == "ab"


def ids(pair: Pair, *texts: str) -> tuple[SampledToken, ...]:
    """Tokens of texts that are encoded one by one, so that each begins a token."""
    return tuple(SampledToken(i) for text in texts for i in pair.reference.encode(text).ids)


def test_tokens_after_the_one_that_completes_the_stop_string_are_dropped(byte_level: Pair) -> None:  # noqa: F811
    one = reader(byte_level.loaded, "Q7")
    read = one.read(Chunk(ids(byte_level, "Q", "7", "x", "y")))
    assert (read.texts, read.tail, one.ended) == (("", ""), "", True)
    assert read.chunk.finish == Finish(FinishReason.STOP, stop_string="Q7")
    assert read.chunk.tokens == ids(byte_level, "Q", "7")


def test_a_beginning_waits_across_chunks(byte_level: Pair) -> None:  # noqa: F811
    one = reader(byte_level.loaded, "Q7")
    reads = [one.read(Chunk(ids(byte_level, *texts))) for texts in (["x", "Q"], ["8"], ["Q"])]
    assert ["".join(read.texts) for read in reads] == ["x", "Q8", ""]


def test_a_stop_string_of_a_character_in_several_tokens(byte_level: Pair) -> None:  # noqa: F811
    euro = ids(byte_level, "€")
    assert len(euro) == 3
    one = reader(byte_level.loaded, "€")
    assert one.read(Chunk(euro[:2])).texts == ("", "")
    last = one.read(Chunk((euro[2], *euro)))
    assert (last.chunk.tokens, last.chunk.finish) == (euro[2:], Finish(FinishReason.STOP, stop_string="€"))


def test_what_was_held_comes_before_the_cut_character(byte_level: Pair) -> None:  # noqa: F811
    one = reader(byte_level.loaded, "Q7")
    cut = (*ids(byte_level, "Q"), *ids(byte_level, "€")[:2])
    assert one.read(Chunk(cut, finish=Finish(FinishReason.LENGTH))).tail == "Q\N{REPLACEMENT CHARACTER}"


@given(token_ids=st.lists(st.integers(0, 399), max_size=30), cuts=st.lists(st.integers(0, 30), max_size=5))
def test_how_tokens_come_in_chunks_does_not_matter(
    byte_level: Pair,  # noqa: F811
    token_ids: list[int],
    cuts: list[int],
) -> None:
    bounds = sorted({0, len(token_ids), *(cut for cut in cuts if cut < len(token_ids))})
    parts = [tuple(map(SampledToken, token_ids[a:b])) for a, b in pairwise(bounds)]
    assert _read_all(byte_level, parts) == _read_all(byte_level, [tuple(map(SampledToken, token_ids))])


def _read_all(pair: Pair, parts: Sequence[tuple[SampledToken, ...]]) -> tuple[str, int]:
    """Text and number of tokens; stop strings are "e" and a new line with a space."""
    one = reader(pair.loaded, "e", "\n ")
    reads: list[ReadChunk] = []
    for part in parts:
        if not one.ended:
            reads.append(one.read(Chunk(part)))
    if not one.ended:
        reads.append(one.read(Chunk(finish=Finish(FinishReason.LENGTH))))
    return text_of(reads), sum(len(read.chunk.tokens) for read in reads)
