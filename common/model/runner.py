"""Runs the decoder on the engine's batches: plan, forward, store routing rows, return logits."""

from collections.abc import Sequence

import torch

from common.kv.store import KVStore
from common.model.batch import Chunk
from common.model.decoder import MoeDecoder
from common.model.plan import ForwardPlan, plan_forward
from common.routing.capture import RoutingCapture


class ModelRunner:
    """`common.model.batch.Runner` for a decoder and the store that its K, V and routing rows go to."""

    def __init__(self, decoder: MoeDecoder, store: KVStore) -> None:
        assert store.layout.dtype == decoder.dtype, "the store and the decoder differ in dtype"
        self._decoder = decoder
        self._store = store

    @torch.inference_mode()
    def execute(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """See `Runner.execute`. Nothing is captured when no chunk wants rows. An empty batch is legal."""
        if not chunks:
            return torch.empty(0, self._decoder.config.vocab_size, device=self._decoder.device)
        plan = plan_forward(chunks, self._decoder.config, self._store)
        capture = self._new_capture(plan)
        x_TH = self._decoder.forward(plan, self._store.kv_L2SGD, capture)
        if capture is not None:
            self._store.write_rows(plan.routed_slots, capture.take()[plan.routed_tokens])
        return self._decoder.logits(x_TH[plan.logits_N])

    def _new_capture(self, plan: ForwardPlan) -> RoutingCapture | None:
        if not len(plan.routed_tokens):
            return None
        return RoutingCapture(self._store.routing, len(plan.token_ids_T), self._decoder.device)
