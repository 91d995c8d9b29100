"""How long a step takes, as a function of what it computes. Pure: no clock, no torch.

Linear in a few counts, as the latency models of DistServe (arXiv 2401.09670, appendix A) and Vidur (arXiv 2405.05465)
are: work per token, work per pair of query and key, and what a step costs anyway. What a mixture of experts adds is the
share of expert weights that a step has to read. It grows with the number of tokens and saturates: of `E` experts, `n`
tokens that choose `k` each, evenly, are expected to need the share `1 - (1 - k/E)^n`.
"""

from typing import NamedTuple


class StepWork(NamedTuple):
    """What one step computes."""

    #: Of prompts, and of sequences that are computed again.
    prompt_tokens: int = 0
    #: Keys that these tokens attend to, added up: `n` tokens from position `start` on have `n*start + n*(n+1)/2`.
    prompt_pairs: float = 0
    #: Sequences that decode one token.
    decode_tokens: int = 0
    #: Keys that they attend to, added up.
    decode_pairs: float = 0

    def with_prompt(self, num_tokens: int, start: int) -> "StepWork":
        """The same and positions [start, start + num_tokens) of a prompt."""
        return self._replace(
            prompt_tokens=self.prompt_tokens + num_tokens,
            prompt_pairs=self.prompt_pairs + num_pairs(start, start + num_tokens),
        )


def num_pairs(start: int, end: int) -> float:
    """Keys that the positions [start, end) attend to, each its own and all before it, added up."""
    return (end - start) * (start + end + 1) / 2


class StepTimes(NamedTuple):
    """The measured seconds behind each count; all are at least 0, so a step that computes more never takes less."""

    #: Of every step.
    fixed_s: float = 0.0
    #: Of a step that reads the weights of all experts.
    experts_s: float = 0.0
    prompt_token_s: float = 0.0
    prompt_pair_s: float = 0.0
    decode_token_s: float = 0.0
    decode_pair_s: float = 0.0
    #: Share of the experts that one token leaves alone: `1 - top_k / num_experts`.
    unread: float = 0.0

    def predict(self, work: StepWork) -> float:
        """Seconds of a step."""
        prompt_tokens, prompt_pairs, decode_tokens, decode_pairs = work
        return (
            self.fixed_s
            + self.experts_s * (1.0 - self.unread ** (prompt_tokens + decode_tokens))
            + self.prompt_token_s * prompt_tokens
            + self.prompt_pair_s * prompt_pairs
            + self.decode_token_s * decode_tokens
            + self.decode_pair_s * decode_pairs
        )

    def prompt_s(self, num_tokens: int, chunk_tokens: int) -> float:
        """Seconds of a whole prompt that is computed alone, in chunks of that size."""
        starts = range(0, num_tokens, chunk_tokens)
        chunks = [StepWork().with_prompt(min(chunk_tokens, num_tokens - start), start) for start in starts]
        return sum(map(self.predict, chunks))


def features(work: StepWork, unread: float) -> tuple[float, ...]:
    """What the coefficients of `StepTimes` are multiplied by, in their order."""
    prompt_tokens, prompt_pairs, decode_tokens, decode_pairs = work
    experts = 1.0 - unread ** (prompt_tokens + decode_tokens)
    return (1.0, experts, prompt_tokens, prompt_pairs, decode_tokens, decode_pairs)
