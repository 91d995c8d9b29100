"""The Prefill gRPC service: computes a prompt and pushes it to a decode worker while it computes."""

import asyncio
import time
from dataclasses import replace

import grpc
import numpy as np
import structlog

from common.engine.request import EngineEvent, EngineRequest, Failed, PromptAdvanced, RequestId, Work
from common.errors import HandoffError, MoerelayError, WorkerLostError
from common.handoff.lease import LeaseRef
from common.handoff.messages import Generation, TransferId
from common.handoff.sender import HandoffSender
from common.handoff.transfer import Transfer
from common.pb import prefill_pb2, prefill_pb2_grpc
from common.prompt_logprobs import PromptLogprobs
from common.tracing import current_span
from common.worker.core import WorkerCore
from common.worker.lifecycle import Lifecycle
from common.worker.requests import engine_request as to_engine_request
from prefill_worker.handoff_stats import HandoffStats

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[prefill_pb2.PrefillRequest, prefill_pb2.PrefillReply]


class Prompts:
    """One request's PromptAdvanced events in order, for a transfer that may be slower than the engine.

    The latest says all of KV and rows, so that nothing piles up but the logprobs, which every event brings its own of.
    """

    def __init__(self) -> None:
        self._ready = asyncio.Event()
        self._latest: PromptAdvanced | None = None
        self._logprobs: list[PromptLogprobs] = []
        self._error: MoerelayError | None = None

    def put(self, event: EngineEvent) -> None:
        match event:
            case PromptAdvanced():
                self._latest = event
                if event.prompt_logprobs is not None:
                    self._logprobs.append(event.prompt_logprobs)
                self._ready.set()
            case Failed(error=error):
                self.fail(error)
            case _:
                raise AssertionError(f"a prefill does not emit {type(event).__name__}")

    def fail(self, error: MoerelayError) -> None:
        """Ends the request with `error`; the first one wins."""
        self._error = self._error or error
        self._ready.set()

    async def next(self) -> PromptAdvanced:
        """The newest progress not seen yet, with all logprobs not seen yet. Raises the request's error if it failed."""
        await self._ready.wait()
        self._ready.clear()
        if self._error is not None:
            raise self._error
        assert self._latest is not None
        unseen, self._logprobs = self._logprobs, []
        return replace(self._latest, prompt_logprobs=PromptLogprobs(np.concatenate(unseen)) if unseen else None)


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """One call per prompt; whatever ends the call frees the request's blocks and ends the transfer."""

    def __init__(self, core: WorkerCore, sender: HandoffSender, lifecycle: Lifecycle) -> None:
        self._core = core
        self._sender = sender
        self._lifecycle = lifecycle
        self.stats = HandoffStats()
        self._prompts: dict[RequestId, Prompts] = {}

    async def abort(self, request_id: RequestId, choice: int | None = None) -> bool:
        """Ends the call, which first ends the transfer and then frees the blocks that it reads.

        A single choice is the decode worker's business: the prompt is computed for the others all the same.
        """
        prompts = self._prompts.get(request_id)
        if prompts is not None and choice is None:
            prompts.fail(HandoffError("the prefill was aborted"))
        return prompts is not None

    def live_requests(self) -> list[RequestId]:
        return list(self._prompts)

    def check_invariants(self) -> list[str]:
        surplus = self._sender.num_active - len(self._prompts)
        return [f"{surplus} transfers are under way for no live request"] if surplus > 0 else []

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Context) -> prefill_pb2.PrefillReply:
        prompts, request_id = Prompts(), RequestId(request.request_id)
        with (
            self._lifecycle.serving(admitted=True),
            self._core.bridge.subscribed(request_id, prompts),
            structlog.contextvars.bound_contextvars(request_id=request_id),
            self._core.spans.served("prefill", request_id, context),
        ):
            self._prompts[request_id] = prompts
            try:
                core = self._core
                engine_request = await to_engine_request(request, Work.PREFILL, core.description, core.grammars)
                return await self._hand_over(engine_request, request.lease, prompts)
            except WorkerLostError as error:
                # To the router a lost worker is the one it called, which it then leaves alone for a while. This worker
                # lives; what is lost is its connection to the decode worker.
                raise HandoffError(error.message) from error
            finally:
                del self._prompts[request_id]
                self._core.engine.cancel(request_id)

    async def _hand_over(
        self, request: EngineRequest, lease: prefill_pb2.Lease, prompts: Prompts
    ) -> prefill_pb2.PrefillReply:
        arrived = time.monotonic()
        routing = request.routing_start is not None
        num_top = request.sampling.prompt_logprobs
        ref = _lease_ref(lease)
        # No prompt is computed for a decode worker that cannot be reached, and a refusal breaks no handoff: it comes
        # before the transfer begins, and the decode worker just hears that it is over.
        await self._sender.ready(ref)
        self._core.engine.submit(request)
        async with self._sender.transfer(ref, routing=routing, num_top=num_top) as transfer:
            with self.stats.counted(transfer, routing=routing):
                first = await prompts.next()
                with current_span().child("handoff.send") as span, self.stats.timed():
                    last, computed = await self._push(transfer, prompts, first)
                    num_computed = len(request.prompt) - last.num_cached
                    await transfer.finish(last.first_tokens, num_computed, span.traceparent)
        return prefill_pb2.PrefillReply(
            num_computed_tokens=num_computed,
            num_cached_tokens=last.num_cached,
            num_bytes_sent=transfer.num_bytes_sent,
            compute_s=computed - arrived,
            handoff_tail_s=time.monotonic() - computed,
        )

    async def _push(
        self, transfer: Transfer, prompts: Prompts, advanced: PromptAdvanced
    ) -> tuple[PromptAdvanced, float]:
        """Ships what the decode worker lacks as it is computed, beginning with what is there.

        Returns what came with the prompt's end, and when.
        """
        while True:
            computed = time.monotonic()
            await transfer.send_range(advanced.blocks, 0, advanced.computed, advanced.prompt_logprobs)
            if advanced.first_tokens:
                return advanced, computed
            advanced = await prompts.next()


def _lease_ref(lease: prefill_pb2.Lease) -> LeaseRef:
    return LeaseRef(
        transfer_id=TransferId(lease.transfer_id),
        generation=Generation(lease.generation),
        endpoint=lease.endpoint,
        num_cached_tokens=lease.num_cached_tokens,
        timeout_s=lease.timeout_s,
        instance_id=lease.instance_id,
    )
