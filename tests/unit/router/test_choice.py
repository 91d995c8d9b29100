"""The reader of one choice: which of its tokens are text, and where it ends."""

from collections.abc import Sequence

import pytest

from common.sampling import Finish, FinishReason, SampledToken, SamplingParams
from router.choice import ChoiceReader, ReadChunk
from router.chunk import Chunk
from router.plan import Plan, TextOptions
from router.text.tokenizer import Tokenizer
from tests.unit.router.text.conftest import Pair, byte_level  # noqa: F401  # a fixture


@pytest.fixture
def tokenizer(byte_level: Pair) -> Tokenizer:  # noqa: F811
    return byte_level.loaded


def reader(tokenizer: Tokenizer, **options: object) -> ChoiceReader:
    text = TextOptions(shown=True, **options)  # type: ignore[arg-type]
    return ChoiceReader(Plan(0, "r", [1, 2], SamplingParams(max_tokens=9), None, text), tokenizer)


def tokens(tokenizer: Tokenizer, text: str) -> tuple[SampledToken, ...]:
    return tuple(SampledToken(i, weight_version="7") for i in tokenizer.encode(text, False))


def text_of(reads: Sequence[ReadChunk]) -> str:
    return "".join("".join(read.texts) + read.tail for read in reads)


@pytest.mark.parametrize(("include", "shown"), [(False, "ab"), (True, "abX")])
def test_a_stop_token_is_text_only_if_asked_for(tokenizer: Tokenizer, include: bool, shown: str) -> None:
    """vLLM leaves out the token that ended the request by its id, unless include_stop_str_in_output."""
    x = tokens(tokenizer, "X")[0]
    one = reader(tokenizer, include_stop=include)
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
    one = reader(tokenizer, stop=("aX",))
    reads = [
        one.read(Chunk(tokens(tokenizer, "a"))),
        one.read(Chunk((x,), finish=Finish(FinishReason.STOP, x.token_id))),
    ]
    assert (text_of(reads), reads[-1].chunk.finish) == ("a", Finish(FinishReason.STOP, x.token_id))


def test_the_last_token_of_a_full_answer_is_text(tokenizer: Tokenizer) -> None:
    one = reader(tokenizer)
    assert text_of([one.read(Chunk(tokens(tokenizer, "aX"), finish=Finish(FinishReason.LENGTH)))]) == "aX"


def test_an_aborted_choice_gives_up_what_was_held_back(tokenizer: Tokenizer) -> None:
    one = reader(tokenizer, stop=("abc",))
    reads = [one.read(Chunk(tokens(tokenizer, "ab"))), one.read(Chunk(finish=Finish(FinishReason.ABORT)))]
    assert ["".join(read.texts) for read in reads] == ["", ""]
    assert reads[-1].tail == "ab"
