"""One connection from a prefill worker (P) to a decode worker (D): handshake, and who gets which answer."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import structlog

from common.errors import HandoffCorruptError, HandoffRefusedError, HandoffTimeoutError, MoerelayError
from common.handoff.channel import Link
from common.handoff.frames import Frame, decode_from_decode, encode
from common.handoff.lease import LeaseRef
from common.handoff.messages import (
    Credit,
    DecodeMessage,
    Done,
    HandoffIdentity,
    Hello,
    Ready,
    Refuse,
    Reject,
    TransferId,
    first_difference,
)

log = structlog.get_logger()


class Answers(Protocol):
    """Who waits for the answers to one transfer."""

    lease: LeaseRef

    def on_message(self, message: Credit | Done | Reject) -> None: ...

    def on_lost(self, error: MoerelayError) -> None: ...


class Session:
    """Lives until it is ended, by `run` or from outside; then it stays over and a new one is needed.

    Args:
        timeout_s: how long the handshake may take.
    """

    def __init__(self, link: Link, endpoint: str, identity: HandoffIdentity, *, timeout_s: float) -> None:
        self.endpoint = endpoint
        self._link = link
        self._identity = identity
        self._timeout_s = timeout_s
        self._transfers: dict[TransferId, Answers] = {}
        self._ready: Ready | None = None
        self._error: MoerelayError | None = None
        #: Set when the handshake has succeeded or the session is over.
        self._settled = asyncio.Event()

    @property
    def num_transfers(self) -> int:
        return len(self._transfers)

    @property
    def is_over(self) -> bool:
        return self._error is not None

    async def run(self) -> None:
        """Greets D and hands out its answers, until the connection is lost or refused. Ends the session."""
        try:
            await self._handshake()
            while True:
                self._dispatch(decode_from_decode(await self._link.receive()))
                # While messages are queued nothing above waits; others on this event loop get their turn here.
                await asyncio.sleep(0)
        except MoerelayError as error:
            log.warning("handoff_connection_over", endpoint=self.endpoint, reason=error.message)
            self.end(error)

    def end(self, error: MoerelayError) -> None:
        """Closes the connection and fails every transfer with `error`. A session that is over stays as it is."""
        if self._error is not None:
            return
        self._error = error
        self._settled.set()
        self._link.close()
        for transfer in list(self._transfers.values()):
            transfer.on_lost(error)

    async def _handshake(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._link.send(encode(Hello(identity=self._identity)))
                answer = decode_from_decode(await self._link.receive())
        except TimeoutError:
            raise HandoffTimeoutError(
                f"the decode worker at {self.endpoint} did not answer the handshake within {self._timeout_s:g} s"
            ) from None
        if isinstance(answer, Refuse):
            raise HandoffRefusedError(f"the decode worker at {self.endpoint} refused this worker: {answer.reason}")
        if not isinstance(answer, Ready):
            raise HandoffCorruptError(f"the decode worker at {self.endpoint} answered the handshake with other things")
        difference = first_difference(self._identity, answer.identity)
        if difference:
            raise HandoffRefusedError(difference)
        self._ready = answer
        self._settled.set()

    def _dispatch(self, message: DecodeMessage) -> None:
        if isinstance(message, Refuse):
            raise HandoffRefusedError(f"the decode worker at {self.endpoint} ended the connection: {message.reason}")
        if isinstance(message, Ready):
            raise HandoffCorruptError(f"the decode worker at {self.endpoint} answered the handshake twice")
        transfer = self._transfers.get(message.transfer_id)
        # Answers to a transfer that has been given up are of no use to anybody.
        if transfer is not None and transfer.lease.generation == message.generation:
            transfer.on_message(message)

    async def ready(self) -> Ready:
        """Waits for the handshake; returns who D is and what it allows.

        Raises:
            HandoffRefusedError: the two workers do not fit.
            HandoffTimeoutError, HandoffCorruptError, WorkerLostError: there was no proper answer.
        """
        await self._settled.wait()
        if self._error is not None:
            raise self._error
        assert self._ready is not None, "settled without an outcome"
        return self._ready

    def attach(self, transfer: Answers) -> None:
        """Hands answers for the transfer's lease to it. Raises HandoffRefusedError if another one uses that lease."""
        if transfer.lease.transfer_id in self._transfers:
            raise HandoffRefusedError(f"lease {transfer.lease.transfer_id} is in use already; ask for a new one")
        self._transfers[transfer.lease.transfer_id] = transfer

    def detach(self, transfer: Answers) -> None:
        """The transfer is over."""
        del self._transfers[transfer.lease.transfer_id]

    async def send(self, frames: Sequence[Frame]) -> None:
        """As `Link.send`."""
        await self._link.send(frames)

    def try_send(self, frames: Sequence[Frame]) -> bool:
        """As `Link.try_send`; a session that is over sends nothing."""
        return self._error is None and self._link.try_send(frames)
