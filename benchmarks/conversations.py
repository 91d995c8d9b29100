"""A made-up trace of conversations: system prompts that many share, turns that grow, pauses in which people read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `prompt_len` counts everything before its output."""

    prompt_len: int
    num_output_tokens: int
    #: Between the end of the turn before and this one.
    pause_s: float


@dataclass(frozen=True, slots=True)
class Conversation:
    """`token_ids`: all of it, outputs included; a turn's prompt is a beginning of it."""

    name: str
    begins_s: float
    token_ids: npt.NDArray[np.int64]
    turns: Sequence[Turn]

    def prompt(self, turn: int) -> list[int]:
        ids: list[int] = self.token_ids[: self.turns[turn].prompt_len].tolist()
        return ids

    def until_after(self, turn: int) -> list[int]:
        """The prompt and the output of a turn."""
        end = self.turns[turn].prompt_len + self.turns[turn].num_output_tokens
        ids: list[int] = self.token_ids[:end].tolist()
        return ids


@dataclass(frozen=True, slots=True)
class Shape:
    """What a trace is made of; ranges are (smallest, largest), drawn uniformly in the logarithm."""

    num_conversations: int
    per_s: float
    vocab_size: int = 32_000
    num_system_prompts: int = 8
    system_tokens: int = 512
    turns: tuple[int, int] = (1, 9)
    user_tokens: tuple[int, int] = (20, 400)
    output_tokens: tuple[int, int] = (30, 300)
    pause_s: tuple[float, float] = (1.0, 15.0)


def conversations(shape: Shape, seed: int) -> Iterator[Conversation]:
    """Poisson arrivals; the n-th system prompt is used in proportion to 1/n, as popular things are (Zipf)."""
    chance = np.random.default_rng(seed)
    systems = [chance.integers(3, shape.vocab_size, shape.system_tokens) for _ in range(shape.num_system_prompts)]
    weights = 1 / np.arange(1, shape.num_system_prompts + 1)
    now = 0.0
    for number in range(shape.num_conversations):
        now += float(chance.exponential(1 / shape.per_s))
        parts = [systems[chance.choice(shape.num_system_prompts, p=weights / weights.sum())]]
        turns = []
        for at in range(round(_between(chance, shape.turns))):
            user, output = (round(_between(chance, r)) for r in (shape.user_tokens, shape.output_tokens))
            parts.append(chance.integers(3, shape.vocab_size, user))
            pause_s = _between(chance, shape.pause_s) if at else 0.0
            turns.append(Turn(sum(map(len, parts)), output, pause_s))
            parts.append(chance.integers(3, shape.vocab_size, output))
        yield Conversation(f"session-{number}", now, np.concatenate(parts), turns)


def _between(chance: np.random.Generator, bounds: tuple[float, float]) -> float:
    low, high = np.log(bounds[0]), np.log(bounds[1])
    return float(np.exp(chance.uniform(low, high)))
