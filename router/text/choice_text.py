"""The text of one choice: tokens in, text out, cut at a stop string."""

from collections.abc import Sequence
from dataclasses import dataclass

from router.text.detokenizer import Detokenizer
from router.text.stop import StopMatcher, StopStrings


@dataclass(frozen=True, slots=True)
class Fed:
    """What came of some tokens: the first `num_tokens` are kept, the rest came after the one that completed `stop`."""

    num_tokens: int
    text: str
    stop: str | None = None


class ChoiceText:
    """Without a detokenizer there is no text, so no stop string either, and all tokens are kept."""

    def __init__(self, detokenizer: Detokenizer | None, stops: StopStrings) -> None:
        assert detokenizer is not None or not stops.patterns, "stop strings need a tokenizer"
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._stopped = False

    def feed(self, token_ids: Sequence[int]) -> Fed:
        """Reads tokens one by one up to the one that completes a stop string; nothing after it counts."""
        if self._stopped:
            return Fed(0, "")
        if self._detokenizer is None:
            return Fed(len(token_ids), "")
        pieces: list[str] = []
        for count, token_id in enumerate(token_ids, start=1):
            shown, stop = self._matcher.feed(self._detokenizer.feed(token_id))
            pieces.append(shown)
            if stop is not None:
                self._stopped = True
                return Fed(count, "".join(pieces), stop)
        return Fed(len(token_ids), "".join(pieces))

    def finish(self) -> str:
        """The rest of the text: what was held back and U+FFFD for a cut character; nothing after a stop string."""
        if self._stopped or self._detokenizer is None:
            return ""
        return self._matcher.finish() + self._detokenizer.finish()
