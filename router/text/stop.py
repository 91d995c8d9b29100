"""Stop strings in text that grows token by token."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Knuth, Morris, Pratt: `border[i]` is the length of the longest proper prefix of `text[: i + 1]` that ends it."""

    text: str
    border: tuple[int, ...]

    @classmethod
    def of(cls, text: str) -> "_Pattern":
        border = [0]
        length = 0
        for character in text[1:]:
            while length and text[length] != character:
                length = border[length - 1]
            length += text[length] == character
            border.append(length)
        return cls(text, tuple(border))

    def scan(self, text: str, matched: int) -> tuple[int, int | None]:
        """Reads `text` with `matched` characters of the pattern already seen.

        Returns the characters seen at the end and the index behind the first whole occurrence that ends in `text`.
        """
        pattern, border, end = self.text, self.border, None
        for index, character in enumerate(text):
            while matched and pattern[matched] != character:
                matched = border[matched - 1]
            matched += pattern[matched] == character
            if matched == len(pattern):
                end = index + 1 if end is None else end
                matched = border[matched - 1]
        return matched, end


class StopStrings:
    """Stop strings of a request, prepared once and shared by its choices."""

    def __init__(self, stops: Sequence[str] = (), *, include: bool = False, min_tokens: int = 0) -> None:
        """`stops`: none of them empty. `include`: the text keeps the stop string. `min_tokens`: see `StopMatcher`."""
        assert all(stops), "an empty stop string was let through"
        self.texts = tuple(stops)
        self.patterns = tuple(_Pattern.of(stop) for stop in stops)
        self.include = include
        self.min_tokens = min_tokens


class StopMatcher:
    """Holds back what may be the beginning of a stop string, and finds the token that completes one.

    The rule is vLLM's: a stop string counts if its last character comes with a token after the first `min_tokens`, and
    if one token completes several, the first in the order of the request wins, at its leftmost place. Work is
    proportional to the number of characters and of stop strings.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._matched = [0] * len(stops.patterns)
        self._held = ""
        self._num_tokens = 0

    def feed(self, text: str) -> tuple[str, str | None]:
        """Takes the text of the next token, "" included: what may be shown, and the stop string it completes, if any.

        After a match nothing may follow, `finish` neither.
        """
        self._num_tokens += 1
        counts = self._num_tokens > self._stops.min_tokens
        found: tuple[str, int] | None = None
        for i, pattern in enumerate(self._stops.patterns):
            self._matched[i], end = pattern.scan(text, self._matched[i])
            if counts and found is None and end is not None:
                found = pattern.text, len(self._held) + end
        seen = self._held + text
        if found is not None:
            stop, end = found
            return seen[: end if self._stops.include else end - len(stop)], stop
        shown = len(seen) - max(self._matched, default=0)
        self._held = seen[shown:]
        return seen[:shown], None

    def finish(self) -> str:
        """What was held back, when the choice ended for another reason."""
        held, self._held = self._held, ""
        return held
