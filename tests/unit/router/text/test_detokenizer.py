"""Pieces of text join to what one-shot decoding gives, and never end inside a character."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.detokenizer import Detokenizer
from tests.unit.router.text.checkpoints import token_id
from tests.unit.router.text.conftest import Pair

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def pieces(pair: Pair, prompt: Sequence[int], ids: Sequence[int], skip: bool = False) -> list[str]:
    """The text of every token, then of the end."""
    detokenizer = Detokenizer(pair.loaded, prompt, skip)
    return [*(detokenizer.feed(token_id) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("text", ["é", "한", "👩‍👩‍👧", "a€b"])
def test_a_character_appears_when_it_is_complete(kind: str, text: str, request: pytest.FixtureRequest) -> None:
    pair: Pair = request.getfixturevalue(kind)
    ids = pair.reference.encode(text, add_special_tokens=False).ids
    found = pieces(pair, [], ids)
    assert "".join(found) == text
    assert not any(REPLACEMENT in piece for piece in found)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize(("text", "cut"), [("a€", 1), ("a€", 2), ("a👧", 1)])
def test_a_cut_character_is_one_replacement_at_the_end(
    kind: str, text: str, cut: int, request: pytest.FixtureRequest
) -> None:
    pair: Pair = request.getfixturevalue(kind)
    ids = pair.reference.encode(text, add_special_tokens=False).ids[:-cut]
    found = pieces(pair, [], ids)
    assert "".join(found[:-1]) == "a"
    assert found[-1] == REPLACEMENT


@given(
    prompt=st.lists(st.integers(0, 399), max_size=5), ids=st.lists(st.integers(0, 420), max_size=60), skip=st.booleans()
)
def test_any_byte_level_ids_join_to_the_one_shot_text(
    byte_level: Pair, prompt: list[int], ids: list[int], skip: bool
) -> None:
    found = pieces(byte_level, prompt, ids, skip)
    assert "".join(found) == byte_level.reference.decode(ids, skip_special_tokens=skip)


@given(before=st.text(min_size=1), after=st.text(), skip=st.booleans())
def test_sentencepiece_text_joins_to_what_follows_the_prompt(
    sentencepiece: Pair, before: str, after: str, skip: bool
) -> None:
    prompt = sentencepiece.reference.encode(before).ids
    ids = sentencepiece.reference.encode(after, add_special_tokens=False).ids
    prompt_text = sentencepiece.reference.decode(prompt, skip_special_tokens=skip)
    whole = sentencepiece.reference.decode([*prompt, *ids], skip_special_tokens=skip)
    if prompt_text:
        assert "".join(pieces(sentencepiece, prompt, ids, skip)) == whole.removeprefix(prompt_text)


def test_the_space_after_the_prompt_is_kept(sentencepiece: Pair) -> None:
    prompt = sentencepiece.reference.encode("a").ids
    hello = token_id(sentencepiece.reference, "▁hello")
    assert pieces(sentencepiece, prompt, [hello, hello]) == [" hello", " hello", ""]


def test_text_that_begins_here_loses_one_space_as_in_one_shot_decoding(sentencepiece: Pair) -> None:
    space, hello = (token_id(sentencepiece.reference, piece) for piece in ("▁", "▁hello"))
    assert pieces(sentencepiece, [1], [hello, hello], skip=True) == ["hello", " hello", ""]
    assert pieces(sentencepiece, [1], [space, hello], skip=True) == ["", " hello", ""]
    assert pieces(sentencepiece, [1], [2, hello], skip=True) == ["", "hello", ""]
    # A visible `<s>` is text, so the space stands inside.
    assert pieces(sentencepiece, [1], [hello], skip=False) == [" hello", ""]


def test_special_tokens_are_shown_or_left_out(byte_level: Pair) -> None:
    ids = [*byte_level.reference.encode("a").ids, 2]
    assert "".join(pieces(byte_level, [], ids, skip=False)) == "a<|im_end|>"
    assert "".join(pieces(byte_level, [], ids, skip=True)) == "a"


def test_broken_bytes_are_not_hoarded(byte_level: Pair) -> None:
    lead = byte_level.reference.encode("€").ids[0]
    found = pieces(byte_level, [], [lead] * 100)
    assert found == ["", *[REPLACEMENT] * 100]
