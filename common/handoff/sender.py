"""The prefill worker's (P) end of handoffs: one connection per decode worker, any number of transfers over it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Self

from common.errors import HandoffRefusedError, MoerelayError, OverloadedError, WorkerLostError
from common.handoff.background import BackgroundTasks
from common.handoff.channel import Connector
from common.handoff.frames import TARGET_PAYLOAD_BYTES
from common.handoff.lease import LeaseRef
from common.handoff.messages import HandoffIdentity, Ready
from common.handoff.outgoing import CREDIT_CHUNKS, MAX_TRANSFERS, OutgoingTransfer
from common.handoff.session import Session
from common.handoff.transfer import Reader, Transfer
from common.kv.store import KVStore
from common.prompt_logprobs import position_bytes

#: Payload that one transfer has under way, whatever the decode worker would allow: more than a fast network swallows in
#: the time that an acknowledgement takes (12 GB/s for 0.5 ms), and little enough to bound the memory of both sides.
WINDOW_BYTES = 8 * 2**20


class HandoffSender:
    """Sends handoffs while it is entered as a context manager. The connector stays the caller's.

    Args:
        identity: what this worker is now; asked when a connection is made, which then outlives new weights.
        timeout_s: every wait for a decode worker that makes no progress ends after this long, or after the lease's
            timeout if that is shorter.
    """

    def __init__(
        self, connector: Connector, store: KVStore, identity: Callable[[], HandoffIdentity], *, timeout_s: float
    ) -> None:
        self._connector = connector
        self._store = store
        self._identity = identity
        self._timeout_s = timeout_s
        self._sessions: dict[str, Session] = {}
        self._reader = Reader(store)
        self._tasks = BackgroundTasks()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.__aexit__(kind, error, trace)
        self._reader.shutdown()

    @property
    def num_active(self) -> int:
        """Transfers under way."""
        return sum(session.num_transfers for session in self._sessions.values())

    @property
    def num_connections(self) -> int:
        """Decode workers to which a connection exists."""
        return sum(not session.is_over for session in self._sessions.values())

    async def ready(self, lease: LeaseRef) -> None:
        """Returns once there is a connection to the decode worker that granted `lease`; begins no handoff.

        Raises:
            HandoffRefusedError, HandoffTimeoutError, HandoffCorruptError, WorkerLostError: as `transfer`.
        """
        await self._ready_session(lease)

    @asynccontextmanager
    async def transfer(self, lease: LeaseRef, *, routing: bool, num_top: int | None = None) -> AsyncIterator[Transfer]:
        """One handoff into `lease`. Left before `finish` returned, it aborts the handoff.

        Args:
            routing: rows travel too.
            num_top: alternatives in each entry of prompt logprobs, which travel too; None: they do not.

        Raises:
            HandoffRefusedError: the decode worker does not fit, is not the one that granted the lease, or the lease
                or its endpoint cannot be used.
            HandoffTimeoutError, HandoffCorruptError, WorkerLostError: the handshake failed.
            OverloadedError: too many transfers to this decode worker are under way.
        """
        session, ready = await self._ready_session(lease)
        transfer = self._open(session, ready, lease, routing=routing, num_top=num_top)
        renewal = self._tasks.start(transfer.keep_lease())
        try:
            yield transfer
            transfer.abandon("it was never finished")
        except BaseException as error:
            transfer.abandon(error.message if isinstance(error, MoerelayError) else type(error).__name__)
            raise
        finally:
            renewal.cancel()
            session.detach(transfer)

    async def _ready_session(self, lease: LeaseRef) -> tuple[Session, Ready]:
        session = self._session(lease.endpoint)
        ready = await session.ready()
        if ready.identity.instance_id != lease.instance_id and session.num_transfers == 0:
            # The decode worker may have restarted, and the loss of the old connection not shown yet: ask once more.
            session.end(WorkerLostError(f"the decode worker at {lease.endpoint} was replaced"))
            session = self._session(lease.endpoint)
            ready = await session.ready()
        if ready.identity.instance_id != lease.instance_id:
            raise HandoffRefusedError(
                f"the lease was granted by instance {lease.instance_id} of the decode worker at {lease.endpoint}, "
                f"which has been replaced by {ready.identity.instance_id}; ask for a new lease"
            )
        return session, ready

    def _open(self, session: Session, ready: Ready, lease: LeaseRef, *, routing: bool, num_top: int | None) -> Transfer:
        if session.num_transfers >= MAX_TRANSFERS:
            raise OverloadedError(f"{MAX_TRANSFERS} handoffs to {lease.endpoint} are under way; try again later")
        token_bytes = self._store.layout.token_bytes + (self._store.routing.row_bytes if routing else 0)
        score_bytes = 0 if num_top is None else position_bytes(num_top)
        core = OutgoingTransfer(
            start=lease.num_cached_tokens,
            credit_bytes=min(ready.credit_bytes, max(WINDOW_BYTES, token_bytes + score_bytes)),
            # More would not be safe: see channel.HIGH_WATER_MARK.
            credit_chunks=min(ready.credit_chunks, CREDIT_CHUNKS),
            token_bytes=token_bytes,
            score_bytes=score_bytes,
            target_bytes=TARGET_PAYLOAD_BYTES,
        )
        timeout_s = min(self._timeout_s, lease.timeout_s)
        transfer = Transfer(session, self._reader, lease, core, routing=routing, timeout_s=timeout_s)
        session.attach(transfer)
        return transfer

    def _session(self, endpoint: str) -> Session:
        """The living session with that endpoint, or a new one."""
        session = self._sessions.get(endpoint)
        if session is None or session.is_over:
            link = self._connector.connect(endpoint)
            session = self._sessions[endpoint] = Session(link, endpoint, self._identity(), timeout_s=self._timeout_s)
            self._tasks.start(session.run()).add_done_callback(partial(self._on_over, session))
        return session

    def _on_over(self, session: Session, _: asyncio.Task[None]) -> None:
        session.end(WorkerLostError("the prefill worker closed its handoff connections"))
        if self._sessions.get(session.endpoint) is session:
            del self._sessions[session.endpoint]
