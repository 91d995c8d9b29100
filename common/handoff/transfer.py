"""One handoff on its way out of a prefill worker (P): what is read from the store, and when it may be sent."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from common.errors import HandoffError, HandoffTimeoutError, MoerelayError
from common.handoff.frames import TARGET_PAYLOAD_BYTES, Frame, encode
from common.handoff.lease import LeaseRef
from common.handoff.messages import Abort, Chunk, Close, Credit, Done, Reject, Renew
from common.handoff.outgoing import OutgoingState, OutgoingTransfer
from common.handoff.payload import Payload, is_offloaded, read_payload
from common.handoff.session import Session
from common.handoff.staging import Staging
from common.kv.pool import BlockId
from common.kv.store import KVStore
from common.prompt_logprobs import PromptLogprobs
from common.sampling import SampledToken

#: A lease is renewed this often within its timeout, so that two renewals may be late before it expires.
RENEWALS_PER_TIMEOUT = 4


class Reader:
    """Copies what is sent out of the store: short copies at once, long ones and those from a device on a thread."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._staging = Staging(TARGET_PAYLOAD_BYTES)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="handoff-read")

    async def read(
        self, blocks: Sequence[BlockId], start: int, end: int, scores: PromptLogprobs | None, *, routing: bool
    ) -> Payload:
        """As `read_payload`."""
        read = partial(
            read_payload, self._store, blocks, start, end, routing=routing, scores=scores, staging=self._staging
        )
        if is_offloaded(self._store, (end - start) * self._store.layout.token_bytes):
            return await asyncio.get_running_loop().run_in_executor(self._thread, read)
        return read()

    def shutdown(self) -> None:
        """Waits for a copy under way."""
        self._thread.shutdown()


class Transfer:
    """One handoff on its way out; made by `HandoffSender.transfer` and used by one task.

    Every method raises what ended the transfer, once something has: HandoffTimeoutError (the decode worker made no
    progress), HandoffRefusedError, HandoffCorruptError or HandoffError (it rejected the handoff), WorkerLostError.
    """

    def __init__(
        self,
        session: Session,
        reader: Reader,
        lease: LeaseRef,
        core: OutgoingTransfer,
        *,
        routing: bool,
        timeout_s: float,
    ) -> None:
        self.lease = lease
        self._session = session
        self._reader = reader
        self._core = core
        self._routing = routing
        self._timeout_s = timeout_s
        #: Set whenever the decode worker has answered, or the connection is lost.
        self._changed = asyncio.Event()

    @property
    def position(self) -> int:
        """Positions below this one are on the decode worker or on their way."""
        return self._core.position

    @property
    def num_bytes_sent(self) -> int:
        """Payload bytes of this transfer."""
        return self._core.num_bytes

    async def send_range(
        self, blocks: Sequence[BlockId], start: int, end: int, scores: PromptLogprobs | None = None
    ) -> None:
        """Sends KV and rows of positions [start, end) of the sequence that owns `blocks`, and logprobs.

        Positions below `position` are skipped: the decode worker has them. `scores` are the prompt logprobs of the
        positions since the last call, and never skipped. On return the blocks are not needed any more, because all
        that is on its way has been copied. Also raises RoutingMissingError, if a row is missing.
        """
        assert start <= self.position, f"positions [{self.position}, {start}) were left out"
        num_scored = 0
        for cut in self._core.split(end, 0 if scores is None else len(scores)):
            if not self._core.has_credit(cut):
                await self._wait_until(partial(self._core.has_credit, cut), "returned no credit")
            self._raise_if_failed()
            seq, chunk_start = self._core.take(cut)
            part = None if scores is None else PromptLogprobs(scores[num_scored : num_scored + cut.num_scores])
            num_scored += cut.num_scores
            payload = await self._reader.read(blocks, chunk_start, cut.end, part, routing=self._routing)
            header = Chunk(
                transfer_id=self.lease.transfer_id,
                generation=self.lease.generation,
                seq=seq,
                start=chunk_start,
                end=cut.end,
                kv_bytes=payload.kv.nbytes,
                rows_bytes=payload.rows.nbytes,
                scores_bytes=payload.scores.nbytes,
                kv_checksum=payload.kv_checksum,
                rows_checksum=payload.rows_checksum,
                scores_checksum=payload.scores_checksum,
            )
            await self._send(encode(header, payload.kv, payload.rows, payload.scores))
            # Nothing above has to wait while there is credit; others on this event loop get their turn here.
            await asyncio.sleep(0)

    async def finish(self, first_tokens: Sequence[SampledToken], num_computed: int, traceparent: str = "") -> None:
        """Sends the token that follows the prompt, for each choice; returns once the whole handoff is applied.

        `num_computed`: prompt tokens that were forwarded for this request, and not found in a cache.
        `traceparent`: names the span of this transfer.
        """
        header = Close(
            transfer_id=self.lease.transfer_id,
            generation=self.lease.generation,
            num_chunks=self._core.num_chunks,
            num_computed=num_computed,
            first_tokens=tuple(first_tokens),
            traceparent=traceparent,
        )
        frames = encode(header)
        self._raise_if_failed()
        self._core.close()
        await self._send(frames)
        await self._wait_until(lambda: self._core.state is OutgoingState.DONE, "did not acknowledge the handoff")

    async def _send(self, frames: Sequence[Frame]) -> None:
        self._raise_if_failed()
        if self._session.try_send(frames):
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._session.send(frames)
        except TimeoutError:
            raise self._timeout("accepted no data") from None

    async def _wait_until(self, condition: Callable[[], bool], complaint: str) -> None:
        """Waits while the decode worker makes progress of any kind."""
        while True:
            self._raise_if_failed()
            if condition():
                return
            self._changed.clear()
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                raise self._timeout(complaint) from None

    def _timeout(self, complaint: str) -> HandoffTimeoutError:
        return HandoffTimeoutError(
            f"the decode worker at {self._session.endpoint} {complaint} for {self._timeout_s:g} s"
        )

    def _raise_if_failed(self) -> None:
        if self._core.error is not None:
            raise self._core.error

    def on_message(self, message: Credit | Done | Reject) -> None:
        """The decode worker answered."""
        self._core.on_message(message)
        self._changed.set()

    def on_lost(self, error: MoerelayError) -> None:
        """The connection is lost."""
        self._core.fail(error)
        self._changed.set()

    async def keep_lease(self) -> None:
        """Renews the lease from the start until cancelled: the prompt may wait longer for its turn than the lease."""
        renew = Renew(transfer_id=self.lease.transfer_id, generation=self.lease.generation)
        while self._core.error is None:
            # A full queue needs no renewal: the messages in it extend the lease.
            self._session.try_send(encode(renew))
            await asyncio.sleep(self._timeout_s / RENEWALS_PER_TIMEOUT)

    def abandon(self, reason: str) -> None:
        """Tells the decode worker, as far as that needs no waiting, unless the handoff is over on its side too."""
        if self._core.state in (OutgoingState.OPEN, OutgoingState.CLOSING):
            abort = Abort(transfer_id=self.lease.transfer_id, generation=self.lease.generation, reason=reason)
            self._session.try_send(encode(abort))
            self._core.fail(HandoffError(f"the transfer was given up: {reason}"))
