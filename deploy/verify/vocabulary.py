"""Texts of a checkpoint's tokens, as far as `moerelay verify` needs them."""

import string
from collections.abc import Sequence
from pathlib import Path

from router.text.tokenizer import Tokenizer, load_tokenizer

#: What a decoder puts for bytes that are no character, or no whole one yet.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_VISIBLE = frozenset(string.digits + string.ascii_letters + string.punctuation)


class Vocabulary:
    """Everything here decodes all tokens at once: nothing is shared with how the router reads a stream."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: the model's; tokens beyond it are never generated."""
        self._tokenizer = tokenizer
        known = range(min(vocab_size, tokenizer.vocab_size))
        texts = [(i, tokenizer.token_text(i)) for i in known if i not in tokenizer.special_ids]
        #: Ids whose text is ASCII and more than spaces, with that text. Such a text is found in the output whatever
        #: bytes stand around it.
        self.pieces = tuple((i, text) for i, text in texts if text.strip(" ") and _VISIBLE.issuperset(text.strip(" ")))

    def text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens)

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The id sequences that vLLM forbids for each word (`SamplingParams.update_from_tokenizer`)."""
        sequences: list[tuple[int, ...]] = []
        for word in words:
            plain, spaced = (tuple(self._tokenizer.encode(space + word.lstrip(), False)) for space in ("", " "))
            sequences.append(plain)
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                sequences.append(spaced)
        return tuple(sequences)

    def stop(
        self, token_ids: Sequence[int], stops: Sequence[str], min_tokens: int, *, skip_special_tokens: bool
    ) -> tuple[int, str] | None:
        """Where an output ends: the number of tokens kept, and the stop string; None if it holds none.

        The text of every prefix is searched. An occurrence counts if it ends with a token after the first `min_tokens`;
        if one token completes several strings, the first of the request counts.

        Args:
            stops: ASCII, none of them beginning with a space, which some decoders strip where a text begins.
        """
        before = ""
        for num_tokens in range(1, len(token_ids) + 1):
            text = self.text(token_ids[:num_tokens], skip_special_tokens=skip_special_tokens)
            settled = len(before.rstrip(_REPLACEMENT))
            for stop in stops:
                if num_tokens > min_tokens and text.find(stop, max(0, settled - len(stop) + 1)) >= 0:
                    return num_tokens, stop
            before = text
        return None


def load_vocabulary(directory: Path, vocab_size: int) -> Vocabulary | None:
    """None if the checkpoint has no tokenizer.json. Raises ConfigError if it has one that cannot be used."""
    tokenizer = load_tokenizer(directory)
    return None if tokenizer is None else Vocabulary(tokenizer, vocab_size)
