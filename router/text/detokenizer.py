"""Text of tokens as they come, never splitting a character."""

import codecs
from collections.abc import Iterable

from router.text.tokenizer import Tokenizer, strip_spaces

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One choice's text. Joined, the pieces are what decoding all ids at once gives after the prompt.

    Constant work per token: bytes of an unfinished character wait in the UTF-8 decoder, at most three of them. A prompt
    is looked at only to learn whether the text begins here, where a tokenizer may strip a space.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Iterable[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = _Utf8(errors="replace")
        begins = tokenizer.strip_start > 0 and not any(self._bytes(token_id) for token_id in prompt_ids)
        self._strip = tokenizer.strip_start if begins else 0

    def feed(self, token_id: int) -> str:
        """The text that became certain with this token."""
        return self._show(self._utf8.decode(self._bytes(token_id)))

    def finish(self) -> str:
        """One U+FFFD if the last character is incomplete, else nothing."""
        return self._show(self._utf8.decode(b"", final=True))

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._hidden else self._tokenizer.token_bytes(token_id) or b""

    def _show(self, text: str) -> str:
        if not self._strip:
            return text
        shown = strip_spaces(text, self._strip)
        self._strip = 0 if shown else self._strip - len(text)
        return shown
