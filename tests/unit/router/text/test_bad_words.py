"""Words to the token sequences that are forbidden."""

import pytest

from common.errors import InvalidRequestError
from router.text.bad_words import encode_bad_words
from tests.unit.router.text import checkpoints
from tests.unit.router.text.conftest import Pair


def test_both_forms_count_when_they_have_the_same_number_of_tokens(byte_level: Pair) -> None:
    """`p` and ` p` are one token each; `X` has one and ` X` two."""
    p, spaced_p, x = (checkpoints.token_id(byte_level.reference, piece) for piece in ("p", "Ġp", "X"))
    assert encode_bad_words(["p", "X"], byte_level.loaded) == ((p,), (spaced_p,), (x,))


def test_the_second_form_must_begin_differently(sentencepiece: Pair) -> None:
    """Sentencepiece puts ▁ in front of `a` by itself: `a` is [▁a] and ` a` is [▁▁, a]."""
    a = sentencepiece.reference.token_to_id("▁a")
    assert encode_bad_words(["a"], sentencepiece.loaded) == ((a,),)


def test_spaces_in_front_are_dropped_and_doubles_merged(byte_level: Pair) -> None:
    assert encode_bad_words(["  p", "p"], byte_level.loaded) == encode_bad_words(["p"], byte_level.loaded)


@pytest.mark.parametrize("word", ["", "   ", "\n"])
def test_a_word_without_tokens_is_refused(byte_level: Pair, word: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"bad_words\[1\]") as caught:
        encode_bad_words(["p", word], byte_level.loaded)
    assert caught.value.param == "bad_words"
