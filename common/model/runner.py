"""Runs the decoder on the engine's batches: plan, forward, store routing rows, return logits and scores."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from common.kv.store import KVLayout, KVStore
from common.model.batch import Chunk, StepOutput
from common.model.config import ModelConfig
from common.model.decoder import MoeDecoder
from common.model.plan import ForwardPlan, plan_forward
from common.model.plan_ahead import PlanAhead
from common.model.scores import score
from common.prompt_logprobs import PromptLogprobs
from common.routing.capture import RoutingCapture

#: Rows whose logits are in memory at once when prompt tokens are scored: with 150,000 ids and fp32, 40 MB.
SCORED_AT_ONCE = 64


def kv_layout(config: ModelConfig, block_size: int, dtype: torch.dtype) -> KVLayout:
    """What a store must look like for this model."""
    return KVLayout(config.num_layers, config.num_kv_heads, config.kv_dim, block_size, dtype, config.num_kv_planes)


class ModelRunner:
    """`common.model.batch.Runner` for a decoder and the store that its K, V and routing rows go to."""

    def __init__(self, decoder: MoeDecoder, store: KVStore) -> None:
        assert store.layout.dtype == decoder.dtype, "the store and the decoder differ in dtype"
        self._resident: MoeDecoder | None = decoder
        self._store = store
        self._plans = PlanAhead(partial(plan_forward, config=decoder.config, store=store, kernels=decoder.kernels))

    def use(self, decoder: MoeDecoder | None) -> None:
        """Computes with other weights of the same shape from the next step on. None: holds none, and runs no step."""
        self._resident = decoder
        self._plans.forget()

    @property
    def decoder(self) -> MoeDecoder:
        """The weights in use; there are some."""
        assert self._resident is not None, "a step without weights"
        return self._resident

    def beside(self, store: KVStore) -> "BorrowingRunner":
        """A runner that computes in another store with whatever weights are in use here at the time."""
        return BorrowingRunner(self, store)

    @property
    def plans(self) -> PlanAhead:
        """Counts the plans that were ready in time."""
        return self._plans

    def prepare(self, chunks: Sequence[Chunk]) -> None:
        """See `Runner`."""
        self._plans.prepare(chunks)

    @torch.inference_mode()
    def execute(self, chunks: Sequence[Chunk]) -> StepOutput:
        """See `Runner`. Nothing is captured when no chunk wants rows. An empty batch is legal."""
        if not chunks:
            return StepOutput(torch.empty(0, self.decoder.config.vocab_size, device=self.decoder.device))
        plan = self._plans.take(chunks)
        capture = self._new_capture(plan)
        x_TH = self.decoder.forward(plan, self._store.kv_LCSGD, capture)
        if capture is not None:
            self._store.write_rows(plan.routed_slots, capture.take()[plan.routed_tokens])
        scored = zip(chunks, plan.first_rows, strict=True)
        scores = tuple(self._score(x_TH[row:], chunk) for chunk, row in scored if chunk.score_targets)
        return StepOutput(self.decoder.logits(x_TH[plan.logits_N]), scores)

    def _score(self, x_TH: torch.Tensor, chunk: Chunk) -> PromptLogprobs:
        """Scores of one chunk, whose hidden states `x_TH` begins with."""
        targets = chunk.score_targets
        assert len(targets) <= len(chunk.token_ids), "a chunk has more score_targets than tokens"
        parts = []
        for begin in range(0, len(targets), SCORED_AT_ONCE):
            end = min(begin + SCORED_AT_ONCE, len(targets))
            parts.append(score(self.decoder.logits(x_TH[begin:end]), targets[begin:end], chunk.num_top))
        return PromptLogprobs(np.concatenate(parts))

    def _new_capture(self, plan: ForwardPlan) -> RoutingCapture | None:
        if not len(plan.routed_tokens):
            return None
        return RoutingCapture(self._store.routing, len(plan.token_ids_T), self.decoder.device)


class BorrowingRunner:
    """`common.model.batch.Runner` with the weights of another runner, which it does not keep alive between steps."""

    def __init__(self, lender: ModelRunner, store: KVStore) -> None:
        self._lender = lender
        self._own = ModelRunner(lender.decoder, store)
        self._own.use(None)

    def prepare(self, chunks: Sequence[Chunk]) -> None:
        """Nothing: there is time."""

    def execute(self, chunks: Sequence[Chunk]) -> StepOutput:
        """See `Runner`."""
        self._own.use(self._lender.decoder)
        try:
            return self._own.execute(chunks)
        finally:
            self._own.use(None)
