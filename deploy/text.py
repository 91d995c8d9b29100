"""Text of a growing list of token ids."""

from pathlib import Path

from tokenizers import Tokenizer

from common.errors import CheckpointError

#: What a tokenizer puts for bytes that are no character yet.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def load_tokenizer(directory: Path) -> Tokenizer:
    """Raises CheckpointError if the directory holds no tokenizer.json, or one that cannot be read."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; name a checkpoint with --model, or send --token-ids")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises no other class, whatever the fault
        raise CheckpointError(f"{path} is not a tokenizer: {error}; name another checkpoint with --model") from error


class TextStream:
    """Decodes tokens as they come; a character that is not complete is held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = ""

    def push(self, token_ids: list[int]) -> str:
        """The text that `token_ids` add."""
        self._ids += token_ids
        return self._advance(self._decoded().rstrip(_REPLACEMENT))

    def finish(self) -> str:
        """What was held back."""
        return self._advance(self._decoded())

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)

    def _advance(self, text: str) -> str:
        """A tokenizer may rewrite the end of its text; what is on the screen already stays."""
        if len(text) <= len(self._shown):
            return ""
        new, self._shown = text[len(self._shown) :], text
        return new
