"""Bad words as the token sequences that workers forbid."""

from collections.abc import Sequence

from common.errors import InvalidRequestError
from router.text.tokenizer import Tokenizer


def encode_bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of each word, by vLLM's rule.

    A word counts at the beginning and in the middle of a text: it is encoded without and with a leading space, and the
    second form is used only if it is another way to begin the same number of tokens. Spaces in front are dropped.

    Raises:
        InvalidRequestError: a word that is empty or has no tokens.
    """
    sequences: list[tuple[int, ...]] = []
    for index, word in enumerate(words):
        bare = tuple(tokenizer.encode(word.lstrip(), False, param="bad_words"))
        if not bare:
            raise InvalidRequestError(
                f"bad_words[{index}] is {word!r}, which has no tokens; leave it out", param="bad_words"
            )
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), False, param="bad_words"))
        sequences.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            sequences.append(spaced)
    return tuple(dict.fromkeys(sequences))
