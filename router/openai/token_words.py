"""How single tokens are written in logprobs."""

from dataclasses import dataclass

from common.sampling import SampledToken
from router.stitch import MAX_JSON_BYTES_PER_CHARACTER, token_bytes
from router.text.tokenizer import Tokenizer

#: JSON of one byte in a list.
_JSON_BYTES_PER_BYTE = 4


@dataclass(frozen=True, slots=True)
class TokenWords:
    """Tokens as text, or as "token_id:7" when the client wants that or the cluster has no tokenizer."""

    tokenizer: Tokenizer | None
    as_ids: bool = False

    def text(self, token_id: int) -> str:
        if self.tokenizer is None or self.as_ids:
            return f"token_id:{token_id}"
        return self.tokenizer.token_text(token_id)

    def bytes(self, token_id: int) -> list[int] | None:
        """What the token stands for; None if it stands for nothing that is known."""
        known = None if self.tokenizer is None else self.tokenizer.token_bytes(token_id)
        return None if known is None else list(known)

    def event_bytes(self, token: SampledToken, text: str) -> int:
        """Upper bound of what a token takes in an event: `text` that it released, and its logprobs with their words."""
        if token.logprob is None:
            return token_bytes(token, text)
        written = (token.logprob, token.logprob, *token.top)
        return token_bytes(token, text) + sum(self._word_bytes(each.token_id) for each in written)

    def _word_bytes(self, token_id: int) -> int:
        num_bytes = len(self.bytes(token_id) or ())
        return MAX_JSON_BYTES_PER_CHARACTER * len(self.text(token_id)) + _JSON_BYTES_PER_BYTE * num_bytes
