"""The decode worker's (D) end of handoffs: answers prefill workers, writes what fits a lease, reports to the engine.

All judgement is in `leases`; this shell does the I/O around it, one message at a time. Chunks are small enough to be
checked and written at once; one writer thread takes those that are not, and those that go to a device.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Self

import structlog

from common.engine.request import RequestId
from common.errors import HandoffCorruptError, MoerelayError, OverloadedError, WorkerLostError
from common.handoff.background import BackgroundTasks
from common.handoff.channel import Listener, PeerGone, PeerId, Received
from common.handoff.frames import ChunkFrames, decode_from_prefill, encode
from common.handoff.handler import HandoffHandler
from common.handoff.lease import PEER_GONE, Failure, Lease, LeaseRef, LeaseState
from common.handoff.leases import Completed, Discarded, Failed, LeaseBook, Verdict, WriteChunk
from common.handoff.messages import (
    Abort,
    Chunk,
    Close,
    Credit,
    DecodeMessage,
    Done,
    FailureKind,
    Generation,
    HandoffIdentity,
    Hello,
    Ready,
    Refuse,
    Reject,
    Renew,
    TransferId,
    first_difference,
    shortened,
)
from common.handoff.outgoing import CREDIT_CHUNKS, ERROR_OF_KIND, MAX_TRANSFERS
from common.handoff.payload import is_offloaded, write_payload
from common.kv.pool import BlockId
from common.kv.store import KVStore
from common.prompt_logprobs import from_bytes
from common.tracing import TRACING_OFF, Tracing

#: Leases are checked this often within one timeout, so that an expiry is noticed at most an eighth of it late, plus the
#: time for which this process stood still.
EXPIRY_CHECKS_PER_TIMEOUT = 8

log = structlog.get_logger()


class HandoffReceiver:
    """Receives handoffs while it is entered as a context manager. The listener stays the caller's.

    Args:
        credit_bytes: what each transfer may have unacknowledged.
        identity: what this worker is now; asked at each handshake, so that a connection outlives new weights.
        timeout_s: a lease without progress for this long expires.
        known_versions: labels of all weights that were in use here.
        tracing: where the span of a handoff that was sent under one goes.
    """

    def __init__(
        self,
        listener: Listener,
        store: KVStore,
        identity: Callable[[], HandoffIdentity],
        *,
        timeout_s: float,
        credit_bytes: int,
        known_versions: Callable[[], Collection[str]],
        handler: HandoffHandler,
        tracing: Tracing = TRACING_OFF,
    ) -> None:
        self.bytes_received = 0
        self.rows_received = 0
        #: Messages that were no messages.
        self.num_malformed = 0
        self._listener = listener
        self._store = store
        self._identity = identity
        self._credit_bytes = credit_bytes
        self._handler = handler
        self._tracing = tracing
        self._book = LeaseBook(
            token_bytes=store.layout.token_bytes,
            row_bytes=store.routing.row_bytes,
            block_size=store.layout.block_size,
            max_chunk_bytes=credit_bytes,
            timeout_s=timeout_s,
            known_versions=known_versions,
        )
        #: Connections whose Hello was accepted.
        self._peers: set[PeerId] = set()
        #: Held while one message is handled: whoever holds it knows that no write is under way.
        self._handling = asyncio.Lock()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="handoff-write")
        self._tasks = BackgroundTasks()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._tasks.start(self._receive())
        self._tasks.start(self._expire())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async with self._handling:
            await self._report(self._book.end_all("the decode worker is shutting down"))
            self._peers.clear()
            await self._tasks.__aexit__(kind, error, trace)
        self._writer.shutdown()

    @property
    def num_active(self) -> int:
        """Leases that hold blocks."""
        return len(self._book)

    @property
    def num_discarded(self) -> int:
        """Messages that arrived for leases that were not open."""
        return self._book.num_discarded

    def check_invariants(self) -> list[str]:
        """Violations, one sentence each."""
        return self._book.check_invariants()

    def grant(
        self,
        request_id: RequestId,
        blocks: Sequence[BlockId],
        num_tokens: int,
        num_cached: int,
        *,
        routing: bool,
        num_top: int | None = None,
    ) -> LeaseRef:
        """Leases `blocks` (all of the sequence, in order) for positions [num_cached, num_tokens).

        `num_top`: alternatives in each entry of prompt logprobs, which come for all positions; None: none come.

        Raises:
            OverloadedError: too many handoffs are under way.
        """
        if len(self._book) >= MAX_TRANSFERS:
            raise OverloadedError(f"{MAX_TRANSFERS} handoffs are under way on this decode worker; try again later")
        lease = self._book.grant(
            request_id,
            blocks,
            num_tokens=num_tokens,
            num_cached=num_cached,
            routing=routing,
            num_top=num_top,
            generation=Generation(secrets.randbits(64)),
            now=time.monotonic(),
        )
        return LeaseRef(
            transfer_id=lease.transfer_id,
            generation=lease.generation,
            endpoint=self._listener.endpoint,
            num_cached_tokens=num_cached,
            timeout_s=self._book.timeout_s,
            instance_id=self._identity().instance_id,
        )

    async def revoke(self, transfer_id: TransferId) -> None:
        """Ends a lease, if it is still there; on return nothing can write into its blocks any more."""
        lease = self._book.find(transfer_id)
        if lease is None:
            return
        if lease.state is LeaseState.OPEN:
            self._book.end(lease, None)
        else:
            lease.failure = None
        async with self._handling:
            await self._tell(lease, FailureKind.ABORTED, "the decode worker revoked the lease")

    async def _receive(self) -> None:
        while True:
            event = await self._listener.receive()
            async with self._handling:
                if isinstance(event, PeerGone):
                    await self._drop_peer(event.peer)
                else:
                    await self._guarded(event)
            # While messages are queued nothing above waits; others on this event loop get their turn here.
            await asyncio.sleep(0)

    async def _expire(self) -> None:
        interval_s = self._book.timeout_s / EXPIRY_CHECKS_PER_TIMEOUT
        while True:
            due = time.monotonic() + interval_s
            await asyncio.sleep(interval_s)
            # Not as of now: a process that stood still has yet to read what its peers sent meanwhile.
            await self._report(self._book.expire(due))

    async def _guarded(self, received: Received) -> None:
        """One peer's message must not end the intake for all others, whatever it made us raise."""
        try:
            await self._on_frames(received)
        except MoerelayError as error:
            self.num_malformed += 1
            log.error("handoff_message_failed", reason=shortened(error.message))
            await self._drop_peer(received.peer, Failure(FailureKind.CORRUPT, shortened(error.message)))

    async def _on_frames(self, received: Received) -> None:
        peer = received.peer
        try:
            message = decode_from_prefill(received.frames)
        except HandoffCorruptError as error:
            self.num_malformed += 1
            await self._refuse(peer, FailureKind.CORRUPT, error.message)
            return
        if isinstance(message, Hello):
            await self._on_hello(peer, message)
        elif peer not in self._peers:
            await self._refuse(peer, FailureKind.REFUSED, "the first message of a connection must be Hello")
        elif isinstance(message, ChunkFrames):
            await self._on_chunk(peer, message)
        else:
            await self._on_control(peer, message)

    async def _on_hello(self, peer: PeerId, hello: Hello) -> None:
        identity = self._identity()
        difference = first_difference(identity, hello.identity)
        if difference:
            await self._refuse(peer, FailureKind.REFUSED, difference)
            return
        self._peers.add(peer)
        await self._send(peer, Ready(identity=identity, credit_bytes=self._credit_bytes, credit_chunks=CREDIT_CHUNKS))

    async def _refuse(self, peer: PeerId, kind: FailureKind, reason: str) -> None:
        log.warning("handoff_peer_refused", reason=reason)
        await self._send(peer, Refuse(reason=reason))
        await self._drop_peer(peer, Failure(kind, reason))

    async def _drop_peer(self, peer: PeerId, failure: Failure = PEER_GONE) -> None:
        """Forgets the handshake of a connection and ends its leases."""
        self._peers.discard(peer)
        await self._report(self._book.lose_peer(peer, failure))

    async def _on_chunk(self, peer: PeerId, frames: ChunkFrames) -> None:
        chunk = frames.header
        verdict = self._book.receive(chunk, peer, time.monotonic())
        if not isinstance(verdict, WriteChunk):
            await self._settle(peer, chunk, verdict)
            return
        lease = verdict.lease
        damage = await self._write(lease, frames)
        if not self._book.finish_write(lease, chunk.end, time.monotonic()):
            await self._report([lease])
        elif damage:
            self._book.end(lease, Failure(FailureKind.CORRUPT, damage))
            await self._report([lease])
        else:
            await self._advance(peer, lease, frames)

    async def _write(self, lease: Lease, frames: ChunkFrames) -> str | None:
        write = partial(write_payload, self._store, lease.blocks, frames)
        if not is_offloaded(self._store, frames.kv.nbytes):
            return write()
        return await asyncio.get_running_loop().run_in_executor(self._writer, write)

    async def _advance(self, peer: PeerId, lease: Lease, frames: ChunkFrames) -> None:
        chunk, request_id = frames.header, RequestId(lease.request_id)
        num_bytes = chunk.kv_bytes + chunk.rows_bytes + chunk.scores_bytes
        self.bytes_received += num_bytes
        self.rows_received += chunk.end - chunk.start if lease.routing else 0
        if lease.num_top is not None and chunk.scores_bytes:
            # A copy: the frame is the transport's memory.
            self._handler.on_prompt_logprobs(request_id, from_bytes(bytes(frames.scores), lease.num_top))
        self._handler.on_advanced(request_id, chunk.end)
        await self._send(
            peer,
            Credit(transfer_id=lease.transfer_id, generation=lease.generation, num_bytes=num_bytes, num_chunks=1),
        )

    async def _on_control(self, peer: PeerId, message: Renew | Close | Abort) -> None:
        verdict = self._book.receive(message, peer, time.monotonic())
        if isinstance(verdict, Completed) and isinstance(message, Close):
            num_cached = verdict.lease.num_tokens - message.num_computed
            now = time.monotonic()
            self._tracing.received("handoff.receive", message.traceparent, now - (verdict.lease.began or now))
            self._handler.on_complete(RequestId(verdict.lease.request_id), message.first_tokens, num_cached)
            await self._send(peer, Done(transfer_id=message.transfer_id, generation=message.generation))
        else:
            await self._settle(peer, message, verdict)

    async def _settle(self, peer: PeerId, message: Renew | Chunk | Close | Abort, verdict: Verdict) -> None:
        if isinstance(verdict, Failed):
            await self._report([verdict.lease])
        elif isinstance(verdict, Discarded):
            await self._send(peer, _reject(message, FailureKind.REFUSED, verdict.reason))

    async def _report(self, leases: Sequence[Lease]) -> None:
        """Tells both sides of leases that ended early; those with a write under way are told of when it returns."""
        for lease in leases:
            if lease.failure is None or lease.writing:
                continue
            kind, reason = lease.failure.kind, lease.failure.reason
            log.warning("handoff_failed", request_id=lease.request_id, kind=kind.value, reason=reason)
            self._handler.on_failed(RequestId(lease.request_id), ERROR_OF_KIND[kind](f"the handoff failed: {reason}"))
            await self._tell(lease, kind, reason)

    async def _tell(self, lease: Lease, kind: FailureKind, reason: str) -> None:
        if lease.peer is not None and lease.peer in self._peers:
            await self._send(PeerId(lease.peer), _reject(lease, kind, reason))

    async def _send(self, peer: PeerId, message: DecodeMessage) -> None:
        try:
            await self._listener.send(peer, encode(message))
        except WorkerLostError:
            await self._drop_peer(peer)


def _reject(transfer: Lease | Renew | Chunk | Close | Abort, kind: FailureKind, reason: str) -> Reject:
    return Reject(transfer_id=transfer.transfer_id, generation=transfer.generation, kind=kind, reason=reason)
