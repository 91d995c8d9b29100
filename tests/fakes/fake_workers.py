"""Workers without an engine: real gRPC servers on loopback that speak proto/ and follow a script.

Tokens and rows are functions of the request, so a test can compute by itself what an answer must hold:
token `i` of choice `c` is `(sum(prompt) + 7 * i + c) % vocab`, and row `t` of layer `l` is `(t + l + k) % experts`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import grpc
import numpy as np
import numpy.typing as npt

from common.errors import DuplicateRequestError, MoerelayError
from common.id_mask import pack_ids
from common.messages import sampling_from_pb
from common.pb import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from common.prompt_logprobs import ENTRY
from common.rpc import PROTOCOL_VERSION, ErrorInterceptor, channel_options
from common.sampling import finish_after
from tests.fakes.fake_control import FakeControl
from tests.fakes.fake_feed import FakeFeeds, FollowingContext

Context = grpc.aio.ServicerContext[Any, Any]
MAX_MESSAGE_BYTES = 64 * 2**20


def description(**changes: Any) -> types_pb2.ModelDescription:
    """A tiny model: 2 layers, 8 experts, 2 per token, 300 ids, context 128, end of sequence 2."""
    values: dict[str, Any] = {
        "family": "qwen3_moe",
        "fingerprint": "f00d",
        "weight_version": "7",
        "dtype": "float32",
        "numerics": "device=fake kernels=example probe=0",
        "num_layers": 2,
        "num_experts": 8,
        "top_k": 2,
        "vocab_size": 300,
        "max_model_len": 128,
        "block_size": 16,
        "num_kv_planes": 2,
        "num_kv_heads": 2,
        "head_dim": 8,
        "routing_dtype": "uint8",
        "routing_enabled": True,
        "eos_token_ids": [2],
    }
    return types_pb2.ModelDescription(**values | changes)


def expected_tokens(prompt: Sequence[int], num_tokens: int, choice: int = 0, vocab: int = 300) -> list[int]:
    return [(sum(prompt) + 7 * i + choice) % vocab for i in range(num_tokens)]


def expected_rows(first: int, end: int, model: types_pb2.ModelDescription) -> npt.NDArray[np.generic]:
    """Rows of positions [first, end): [end - first, L, K] in the model's dtype."""
    grid = np.arange(first, end)[:, None, None] + np.arange(model.num_layers)[:, None] + np.arange(model.top_k)
    return (grid % model.num_experts).astype(model.routing_dtype)


def expected_prompt_logprobs(prompt: Sequence[int], num_top: int) -> bytes:
    """Packed: the logprob of position `i` is `-i / 8`, alternative `k` is id `k` at `-(i + k) / 8`."""
    entries = np.zeros((len(prompt), 1 + num_top), ENTRY)
    for at, token in enumerate(prompt[1:], start=1):
        entries[at, 0] = token, -at / 8, 1
        for k in range(num_top):
            entries[at, 1 + k] = k, -(at + k) / 8, k + 1
    return entries.tobytes()


def cached_tokens(prompt: Sequence[int]) -> int:
    """Of every prompt the fakes know all full blocks, but never the last token."""
    return (len(prompt) - 1) // 16 * 16


@dataclass
class Script:
    """What the fakes do beside answering. Events let a test decide when things happen."""

    model: types_pb2.ModelDescription = field(default_factory=description)
    #: Tokens per chunk; the last chunk may have fewer.
    chunk_tokens: int = 1
    #: Prompt rows per chunk without tokens; 0 sends them with the first token.
    prompt_chunk: int = 0
    #: Decode computes prompts of which it does not know more tokens than this, instead of granting a lease.
    local_prefill_max_tokens: int = 0
    #: While clear, decode grants no lease.
    lease_go: asyncio.Event = field(default_factory=asyncio.Event)
    #: Chunks after which decode waits for `release`.
    hold_after: int | None = None
    release: asyncio.Event = field(default_factory=asyncio.Event)
    #: Tokens after which decode raises `decode_error`, or ends its stream without a finish reason if that is None.
    break_after: int | None = None
    decode_error: MoerelayError | None = None
    #: Rows dropped from the last chunk, or from the one that begins with token `missing_at`.
    missing_rows: int = 0
    missing_at: int | None = None
    #: What prefill raises, once `prefill_go` is set.
    prefill_error: MoerelayError | None = None
    prefill_go: asyncio.Event = field(default_factory=asyncio.Event)
    #: Logprob that every token gets if the request asks for logprobs.
    logprob: float = -0.5
    exposition: str = ""

    def __post_init__(self) -> None:
        self.lease_go.set()
        self.prefill_go.set()


#: Decode workers by the endpoint in their leases.
_RECEIVERS: WeakValueDictionary[str, "FakeWorker"] = WeakValueDictionary()


class FakeWorker(  # type: ignore[misc]  # coroutines that write to their context
    FakeFeeds, FakeControl, decode_pb2_grpc.DecodeServicer, prefill_pb2_grpc.PrefillServicer
):
    """One worker of any role. Records what it was asked and how calls ended."""

    def __init__(self, worker_id: str, role: types_pb2.Role.ValueType, script: Script) -> None:
        FakeFeeds.__init__(self)
        FakeControl.__init__(self)
        self.worker_id = worker_id
        self.role = role
        self.script = script
        self.instance_id = f"{worker_id}-1"
        self.draining = False
        self.protocol_version = PROTOCOL_VERSION
        self.address = ""
        self.decode_requests: list[decode_pb2.GenerateRequest] = []
        self.prefill_requests: list[prefill_pb2.PrefillRequest] = []
        self.abort_requests: list[str] = []
        #: (request id, choice) of every single choice that was ended.
        self.dropped: list[tuple[str, int]] = []
        self.num_chunks = 0
        self._endpoint = f"inproc://{id(self)}"
        _RECEIVERS[self._endpoint] = self
        #: By the id of a request that has a lease: set once a prefill worker was asked to fill it.
        self._filling: dict[str, asyncio.Event] = {}
        #: Ids whose call was cancelled from outside.
        self.cancelled: list[str] = []
        #: While clear, heartbeats get no answer.
        self.answers = asyncio.Event()
        self.answers.set()
        self._changed = asyncio.Event()

    async def Describe(self, request: worker_pb2.DescribeRequest, context: Context) -> worker_pb2.WorkerStatus:
        await self.answers.wait()
        return worker_pb2.WorkerStatus(
            worker_id=self.worker_id,
            instance_id=self.instance_id,
            role=self.role,
            pid=4242,
            address=self.address,
            exact=True,
            draining=self.draining,
            model=self.described(self.script.model),
            load=worker_pb2.WorkerLoad(running=len(self.live), kv_blocks_used=3, kv_blocks_total=64),
            protocol_version=self.protocol_version,
            pause=self.pause_state,
            sleep_level=self.sleep_level,
            staged_version=self.staged_version,
            cpus="0-3,8",
            threads=5,
        )

    async def Abort(self, request: worker_pb2.AbortRequest, context: Context) -> worker_pb2.AbortReply:
        aborted = self.live.get(request.request_id)
        if request.HasField("choice"):
            self.dropped.append((request.request_id, request.choice))
            self._tell()
            return worker_pb2.AbortReply(found=aborted is not None)
        self.abort_requests.append(request.request_id)
        if aborted is not None:
            aborted.set()
        return worker_pb2.AbortReply(found=aborted is not None)

    async def Metrics(self, request: worker_pb2.MetricsRequest, context: Context) -> worker_pb2.MetricsReply:
        return worker_pb2.MetricsReply(exposition=self.script.exposition.encode())

    async def Generate(  # type: ignore[override]  # a coroutine that writes to its context
        self, request: decode_pb2.GenerateRequest, context: Context
    ) -> None:
        following = self.following(request, context)
        if following is None:
            await self.answer(request, context)
        else:
            await following.run(self.answer(request, following))

    async def answer(self, request: decode_pb2.GenerateRequest, context: Context | FollowingContext) -> None:
        """Generate, whichever way its events go."""
        self.refuse_when_paused()
        self.decode_requests.append(request)
        unfinished = set(range(request.sampling.n))
        async with self._serving(request.request_id) as aborted:
            if request.prefill_site == decode_pb2.PREFILL_SITE_REMOTE:
                await self.script.lease_go.wait()
                await self._admit(request, context, aborted)
            for num_sent, chunk in enumerate(_chunks(request, self.script)):
                await self._hold(num_sent, aborted)
                await either(self.thawed, aborted)
                if aborted.is_set():
                    for left in sorted(unfinished):
                        await context.write(_event(finish_reason=types_pb2.FINISH_REASON_ABORT, choice=left))
                    return
                choice = chunk.message.choice
                if (request.request_id, choice) in self.dropped:
                    if choice in unfinished:
                        unfinished.discard(choice)
                        await context.write(_event(finish_reason=types_pb2.FINISH_REASON_ABORT, choice=choice))
                    continue
                if chunk.message.finish_reason:
                    unfinished.discard(choice)
                if self.script.break_after is not None and chunk.first_token >= self.script.break_after:
                    if self.script.decode_error:
                        raise self.script.decode_error
                    return
                self.num_chunks += 1
                self._tell()
                await context.write(decode_pb2.GenerateEvent(chunk=chunk.message))

    async def _admit(
        self, request: decode_pb2.GenerateRequest, context: Context | FollowingContext, aborted: asyncio.Event
    ) -> None:
        """With a lease, until a prefill worker has heard of it: there is no token before."""
        num_cached = cached_tokens(request.token_ids)
        if len(request.token_ids) - num_cached <= self.script.local_prefill_max_tokens:
            local = decode_pb2.LocalPrefill(num_cached_tokens=num_cached)
            await context.write(decode_pb2.GenerateEvent(local_prefill=local))
            return
        filling = self._filling[request.request_id] = asyncio.Event()
        try:
            lease = prefill_pb2.Lease(transfer_id=1, endpoint=self._endpoint)
            await context.write(decode_pb2.GenerateEvent(lease=lease))
            await either(filling, aborted)
        finally:
            del self._filling[request.request_id]

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Context) -> prefill_pb2.PrefillReply:
        self.prefill_requests.append(request)
        receiver = _RECEIVERS.get(request.lease.endpoint)
        if receiver and (filling := receiver._filling.get(request.request_id)):
            filling.set()
        async with self._serving(request.request_id):
            await self.script.prefill_go.wait()
            if self.script.prefill_error:
                raise self.script.prefill_error
            num_cached = cached_tokens(request.token_ids)
            return prefill_pb2.PrefillReply(
                num_computed_tokens=len(request.token_ids) - num_cached, num_cached_tokens=num_cached
            )

    async def CheckInvariants(
        self, request: worker_pb2.CheckInvariantsRequest, context: Context
    ) -> worker_pb2.CheckInvariantsReply:
        return worker_pb2.CheckInvariantsReply()

    def changed(self) -> None:
        self._tell()

    async def wait_idle(self) -> None:
        await self.wait_until(lambda: not self.live)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Returns once `condition` holds; it is looked at whenever a call starts, advances or ends."""
        async with asyncio.timeout(30):
            while not condition():
                await self._changed.wait()

    @asynccontextmanager
    async def _serving(self, request_id: str) -> AsyncIterator[asyncio.Event]:
        if request_id in self.live:
            raise DuplicateRequestError(f"{request_id} is live already")
        aborted = self.live[request_id] = asyncio.Event()
        self._tell()
        try:
            yield aborted
        except asyncio.CancelledError:
            self.cancelled.append(request_id)
            raise
        finally:
            del self.live[request_id]
            self._tell()

    def _tell(self) -> None:
        """Wakes everybody who waits now; later ones wait for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _hold(self, num_sent: int, aborted: asyncio.Event) -> None:
        if self.script.hold_after is None or num_sent < self.script.hold_after:
            return
        await either(self.script.release, aborted)


async def either(*events: asyncio.Event) -> None:
    """Returns once one of them is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


@dataclass(frozen=True)
class _Chunk:
    first_token: int
    message: decode_pb2.TokenChunk


def _chunks(request: decode_pb2.GenerateRequest, script: Script) -> Iterator[_Chunk]:
    """The choices take turns, one chunk each."""
    turns = [_choice_chunks(request, script, choice) for choice in range(request.sampling.n)]
    while turns:
        for turn in list(turns):
            chunk = next(turn, None)
            if chunk is None:
                turns.remove(turn)
            else:
                yield chunk


def _choice_chunks(request: decode_pb2.GenerateRequest, script: Script, choice: int) -> Iterator[_Chunk]:
    tokens, finish, stop = _tokens(request, script, choice)
    prompt_len, start = len(request.token_ids), request.routing.start
    row = start
    while script.prompt_chunk and row + script.prompt_chunk < prompt_len:
        yield _Chunk(0, _message(request, script, [], row, row + script.prompt_chunk, choice))
        row += script.prompt_chunk
    for first in range(0, len(tokens), script.chunk_tokens):
        part = tokens[first : first + script.chunk_tokens]
        end = prompt_len + first + len(part) - 1
        last = first + len(part) == len(tokens)
        lacks = last if script.missing_at is None else first == script.missing_at
        message = _message(request, script, part, row, end - (script.missing_rows if lacks else 0), choice)
        if first == 0 and choice == 0 and request.sampling.HasField("prompt_logprobs"):
            message.prompt_logprobs = expected_prompt_logprobs(request.token_ids, request.sampling.prompt_logprobs)
        if first == 0:
            message.num_cached_tokens = cached_tokens(request.token_ids)
        row = end
        if last:
            message.finish_reason = finish
            if stop is not None:
                message.stop_token_id = stop
        yield _Chunk(first, message)


def _tokens(
    request: decode_pb2.GenerateRequest, script: Script, choice: int
) -> tuple[list[int], types_pb2.FinishReason.ValueType, int | None]:
    """The choice's tokens up to where the request's own rules end it."""
    params = sampling_from_pb(request.sampling)
    every = expected_tokens(request.token_ids, params.max_tokens, choice, script.model.vocab_size)
    for at, token in enumerate(every, start=1):
        end = finish_after(params, frozenset(script.model.eos_token_ids), token, at)
        if end is not None:
            return every[:at], types_pb2.FinishReason.Value(f"FINISH_REASON_{end.reason.upper()}"), end.stop_token_id
    raise AssertionError("max_tokens ends every choice")


def _message(
    request: decode_pb2.GenerateRequest,
    script: Script,
    tokens: Sequence[int],
    first_row: int,
    end_row: int,
    choice: int,
) -> decode_pb2.TokenChunk:
    rows = expected_rows(first_row, end_row if request.routing.enabled else first_row, script.model)
    plain = not (request.sampling.HasField("logprobs") or request.sampling.sampling_mask)
    return decode_pb2.TokenChunk(
        token_ids=tokens if plain else (),
        weight_version=script.model.weight_version if plain and tokens else "",
        tokens=() if plain else [_token(token, request, script) for token in tokens],
        routing_rows=rows.tobytes(),
        num_rows=len(rows),
        choice=choice,
    )


def _token(token: int, request: decode_pb2.GenerateRequest, script: Script) -> types_pb2.SampledToken:
    version = script.model.weight_version
    mask = pack_ids([token]) if request.sampling.sampling_mask else b""
    if not request.sampling.HasField("logprobs"):
        return types_pb2.SampledToken(token_id=token, mask=mask, weight_version=version)
    own = types_pb2.TokenLogprob(token_id=token, logprob=script.logprob, rank=2)
    top = [types_pb2.TokenLogprob(token_id=i, logprob=-0.25, rank=1) for i in range(request.sampling.logprobs)]
    return types_pb2.SampledToken(token_id=token, logprob=own, top=top, mask=mask, weight_version=version)


def _event(**fields: Any) -> decode_pb2.GenerateEvent:
    return decode_pb2.GenerateEvent(chunk=decode_pb2.TokenChunk(**fields))


@asynccontextmanager
async def serving(worker: FakeWorker, address: str = "127.0.0.1:0") -> AsyncIterator[FakeWorker]:
    """Runs the worker's gRPC server; `worker.address` is where."""
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=channel_options(MAX_MESSAGE_BYTES))
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    decode_pb2_grpc.add_DecodeServicer_to_server(worker, server)
    prefill_pb2_grpc.add_PrefillServicer_to_server(worker, server)
    host = address.rpartition(":")[0]
    worker.address = f"{host}:{server.add_insecure_port(address)}"
    await server.start()
    try:
        yield worker
    finally:
        await server.stop(None)
