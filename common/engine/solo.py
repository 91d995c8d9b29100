"""The oracle: one request alone, its prompt in one chunk, then token by token. No scheduler, no cache, no handoff."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.engine.sampler import SampleSpec, sample
from common.errors import InvalidRequestError, MoerelayError
from common.kv.pool import NULL_BLOCK, BlockId
from common.kv.store import KVStore, slots_of
from common.model.batch import Chunk, Runner
from common.routing.record import RoutingArray
from common.sampling import Finish, SampledToken, SamplingParams, finish_after


@dataclass(frozen=True, slots=True)
class SoloResult:
    """What every way of serving the request must return, bit for bit. `rows_TLK` is None when routing is off."""

    tokens: tuple[SampledToken, ...]
    rows_TLK: RoutingArray | None
    finish: Finish


class SoloRunner:
    """Runs requests one after the other in a store that nobody else uses."""

    def __init__(self, runner: Runner, store: KVStore, eos_token_ids: frozenset[int]) -> None:
        self._runner = runner
        self._store = store
        self._eos_token_ids = eos_token_ids

    def run(self, prompt: Sequence[int], sampling: SamplingParams, routing_start: int | None = 0) -> SoloResult:
        """Generates one choice.

        Raises:
            InvalidRequestError: the store has too few blocks.
            MoerelayError: the logits are not finite, or a row is missing.
        """
        blocks = self._take_blocks(len(prompt) + sampling.max_tokens - 1)
        tokens: list[SampledToken] = []
        pending, start, finish = list(prompt), 0, None
        while finish is None:
            chunk = Chunk(pending, start, blocks, wants_logits=True, wants_rows=routing_start is not None)
            token = self._sample(chunk, sampling, num_prompt=len(prompt), num_generated=len(tokens))
            tokens.append(token)
            finish = finish_after(sampling, self._eos_token_ids, token.token_id, len(tokens))
            pending, start = [token.token_id], chunk.end
        rows_TLK = None
        if routing_start is not None:
            rows_TLK = self._store.read_rows(slots_of(blocks, routing_start, start, self._store.layout.block_size))
        return SoloResult(tuple(tokens), rows_TLK, finish)

    def _take_blocks(self, num_slots: int) -> list[BlockId]:
        """The first blocks of the store, blank."""
        num_blocks = -(-num_slots // self._store.layout.block_size)
        if num_blocks >= self._store.num_blocks:
            raise InvalidRequestError(
                f"a solo run of {num_slots} positions needs {num_blocks} KV blocks, "
                f"but the store has {self._store.num_blocks - 1}; give it more",
                param="max_tokens",
            )
        blocks = [BlockId(b) for b in range(NULL_BLOCK + 1, NULL_BLOCK + 1 + num_blocks)]
        self._store.clear_blocks(blocks)
        return blocks

    def _sample(self, chunk: Chunk, sampling: SamplingParams, *, num_prompt: int, num_generated: int) -> SampledToken:
        spec = SampleSpec.of(sampling, self._eos_token_ids, num_prompt=num_prompt, num_generated=num_generated)
        [result] = sample(self._runner.execute([chunk]), [spec])
        if isinstance(result, MoerelayError):
            raise result
        return result
