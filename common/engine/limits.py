"""Fixed bounds of one engine, and how far its results can be relied on."""

from dataclasses import dataclass, field

from common.engine.objectives import Objectives


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Read from the settings and the checkpoint once; every number but that of the swap space is at least 1."""

    #: Tokens per step, over all sequences: the largest prefill chunk.
    max_num_batched_tokens: int
    #: Sequences in the running batch.
    max_num_seqs: int
    #: Requests that may wait for blocks or a seat.
    max_waiting: int
    #: Prompt and generated tokens together.
    max_model_len: int
    vocab_size: int
    #: Host memory for KV and rows of preempted sequences; those that do not fit are computed again.
    swap_space_bytes: int
    #: Positions that are forwarded again get the same bits. Where they do not, KV is always kept, and never replaced.
    exact: bool = True
    #: What requests are meant to keep to; they bound chunks, seats and the waiting line by time.
    objectives: Objectives = field(default_factory=Objectives)
    #: Prompt tokens of a step in which somebody decodes, where no objective says how many; None: all there is room for.
    max_mixed_prefill_tokens: int | None = None
    #: Seconds of a step with a long prompt for which short ones wait; None: however many it takes.
    max_contended_step_s: float | None = None

    @property
    def num_seats(self) -> int:
        """Sequences that may run at once.

        Never more than the token budget: then every decoding sequence gets its token in every step, and a prefilling
        one (which has a seat too) always finds at least one token of budget left. Nothing starves.
        """
        return min(self.max_num_seqs, self.max_num_batched_tokens)
