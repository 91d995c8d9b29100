"""Which prompts are sent, and how much is asked for: lengths drawn from a range, ids at random."""

import argparse
import random
from dataclasses import dataclass

from deploy.load.stream import Ask


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Lengths from `low` to `high`, each as likely as any other."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "LengthRange":
        """'128' or '32:512'; a type of argparse."""
        low, _, high = text.partition(":")
        try:
            found = cls(int(low), int(high or low))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is neither a length nor a range such as 32:512") from None
        if not 1 <= found.low <= found.high:
            raise argparse.ArgumentTypeError(f"{text!r}: lengths are at least 1, the shorter one first")
        return found

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class RandomAsks:
    """Requests whose prompts share nothing, so that no prefix cache helps."""

    prompt: LengthRange
    output: LengthRange
    vocab_size: int

    def draw(self, rng: random.Random) -> Ask:
        token_ids = tuple(rng.randrange(self.vocab_size) for _ in range(self.prompt.draw(rng)))
        return Ask(token_ids, self.output.draw(rng))
