"""Tokens of one choice to its text."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from router.text.choice_text import ChoiceText, Fed
from router.text.detokenizer import Detokenizer
from router.text.stop import StopStrings
from tests.unit.router.text.conftest import Pair

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def choice(pair: Pair, *stops: str) -> ChoiceText:
    return ChoiceText(Detokenizer(pair.loaded, [], True), StopStrings(stops))


def ids(pair: Pair, *texts: str) -> list[int]:
    """Ids of texts that are encoded one by one, so that each begins a token."""
    return [i for text in texts for i in pair.reference.encode(text).ids]


def test_tokens_after_the_one_that_completes_the_stop_string_are_dropped(byte_level: Pair) -> None:
    text = choice(byte_level, "Q7")
    assert text.feed(ids(byte_level, "Q", "7", "x", "y")) == Fed(2, "", "Q7")
    assert text.feed(ids(byte_level, "z")) == Fed(0, "")
    assert text.finish() == ""


def test_a_beginning_waits_across_calls(byte_level: Pair) -> None:
    text = choice(byte_level, "Q7")
    assert text.feed(ids(byte_level, "x", "Q")) == Fed(2, "x")
    assert text.feed(ids(byte_level, "8")) == Fed(1, "Q8")
    assert text.feed(ids(byte_level, "Q")) == Fed(1, "")
    assert text.finish() == "Q"


def test_a_stop_string_of_a_character_in_several_tokens(byte_level: Pair) -> None:
    euro = ids(byte_level, "€")
    assert len(euro) == 3
    text = choice(byte_level, "€")
    assert text.feed(euro[:2]) == Fed(2, "")
    assert text.feed([euro[2], *euro]) == Fed(1, "", "€")


def test_what_was_held_comes_before_the_cut_character(byte_level: Pair) -> None:
    text = choice(byte_level, "Q7")
    assert text.feed([*ids(byte_level, "Q"), *ids(byte_level, "€")[:2]]) == Fed(3, "")
    assert text.finish() == f"Q{REPLACEMENT}"


def test_without_a_tokenizer_all_tokens_are_kept() -> None:
    text = ChoiceText(None, StopStrings([]))
    assert text.feed([1, 2, 3]) == Fed(3, "")
    assert text.finish() == ""


@given(tokens=st.lists(st.integers(0, 399), max_size=30), cuts=st.lists(st.integers(0, 30), max_size=5))
def test_how_tokens_are_grouped_does_not_matter(byte_level: Pair, tokens: list[int], cuts: list[int]) -> None:
    whole = choice(byte_level, "e", "\n ")
    once = whole.feed(tokens)
    grouped = choice(byte_level, "e", "\n ")
    bounds = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    fed = [grouped.feed(tokens[a:b]) for a, b in pairwise(bounds)]
    assert "".join(f.text for f in fed) + grouped.finish() == once.text + whole.finish()
    assert sum(f.num_tokens for f in fed) == once.num_tokens
