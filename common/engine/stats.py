"""What an engine has done so far."""

from dataclasses import dataclass, field

from common.engine.batch import ScheduledBatch
from common.engine.sequence import Phase
from common.histogram import STEP_TOKEN_BUCKETS, BucketCounts


@dataclass(slots=True)
class EngineStats:
    """Totals since the start. Written by the engine thread, readable by any."""

    #: Prompt positions forwarded here.
    prompt_tokens_computed: int = 0
    #: Tokens sampled here.
    generated_tokens: int = 0
    steps: int = 0
    #: Steps that forwarded at least one generated token.
    decode_steps: int = 0
    #: Routing rows that forward passes wrote into the store.
    routing_rows_captured: int = 0
    #: Tokens that each step forwarded.
    step_tokens: BucketCounts = field(default_factory=lambda: BucketCounts(STEP_TOKEN_BUCKETS))
    #: Prompt tokens of admitted requests that may read the prefix cache, and those of them that it held.
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    step_failures: int = 0
    #: Sequences that lost their blocks and kept a copy of what was in them; and those that did not. Those of which no
    #: copy could be made have ended in an error, and are not counted.
    preemptions_swapped: int = 0
    preemptions_recomputed: int = 0
    #: Those that kept a copy beyond the swap space, because they could not do without.
    preemptions_beyond_bound: int = 0
    #: Positions that were copied to host memory; choices that give their prompt up together share its copy.
    swapped_tokens: int = 0
    #: Positions of preempted sequences that were forwarded again.
    recomputed_tokens: int = 0

    @property
    def preemptions(self) -> int:
        """All of them."""
        return self.preemptions_swapped + self.preemptions_recomputed

    def count(self, batch: ScheduledBatch) -> None:
        """A step has computed the batch, whose sequences have not moved on yet."""
        num_decodes, num_rows = batch.work.decode_tokens, 0
        for sequence, start, end, samples in batch.chunks:
            num_tokens = end - start
            if sequence.wants_rows:
                num_rows += num_tokens
            if sequence.phase is Phase.PREFILLING:
                self.prompt_tokens_computed += num_tokens
                self.generated_tokens += samples * sequence.request.sampling.n
            elif sequence.phase is Phase.RECOMPUTING:
                self.recomputed_tokens += num_tokens
                self.generated_tokens += samples
        self.steps += 1
        self.step_tokens.observe(batch.work.prompt_tokens + num_decodes)
        self.decode_steps += num_decodes > 0
        self.generated_tokens += num_decodes
        self.routing_rows_captured += num_rows
