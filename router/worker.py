"""One worker as the router knows it: its channel, its heartbeats, and the choices that depend on it."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Literal

import grpc

from common.errors import MoerelayError, NotTakenError, WorkerLostError
from common.pb import decode_pb2_grpc, prefill_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from common.rpc import channel_options
from common.security.grpc_keys import CHANNEL_OPTIONS, channel_credentials
from common.security.key_file import KeyFile
from router.breaker import Breaker
from router.calls import worker_errors
from router.failure import Failure
from router.feed import Feed
from router.worker_state import State, WorkerState

#: For a call on a channel that was replaced; only control operations take so long.
RETIRE_GRACE_S = 3600.0

Side = Literal["prefill", "decode"]

_SIDE_OF_ROLE: dict[types_pb2.Role.ValueType, Side] = {
    types_pb2.ROLE_PREFILL: "prefill",
    types_pb2.ROLE_DECODE: "decode",
    types_pb2.ROLE_BOTH: "decode",
}

PauseName = Literal["running", "pausing", "paused"]

#: What /cluster calls the states of a worker.
PAUSE_NAMES: dict[worker_pb2.PauseState.ValueType, PauseName] = {
    worker_pb2.PAUSE_STATE_RUNNING: "running",
    worker_pb2.PAUSE_STATE_PAUSING: "pausing",
    worker_pb2.PAUSE_STATE_PAUSED: "paused",
}
_PAUSED = (worker_pb2.PAUSE_STATE_PAUSING, worker_pb2.PAUSE_STATE_PAUSED)


class Worker:
    """Owns the gRPC channel. `side` is where the configuration lists the worker; its own role must agree.

    `keys`: what this router shows and believes now; None: neither encrypts.
    """

    def __init__(
        self,
        address: str,
        side: Side,
        *,
        max_message_bytes: int,
        silence_limit_s: float,
        keys: Callable[[], KeyFile] | None = None,
    ) -> None:
        self.address = address
        self.side = side
        self._max_message_bytes = max_message_bytes
        self._keys = keys
        self._connect()
        self._retiring: set[asyncio.Task[None]] = set()
        #: The last answer to a heartbeat; None until there was one.
        self.status: worker_pb2.WorkerStatus | None = None
        #: Why the worker is not used although it lives; set by the fleet.
        self.refused: str | None = None
        #: A heartbeat has been answered, or missed.
        self.was_asked = False
        #: Whoever lists workers lists this one; set by the fleet.
        self.listed = True
        #: What lists it, as it is configured: its address, or dns://, srv:// or file://; set by the roster.
        self.source = address
        #: Whether it does what it is given.
        self.breaker = Breaker()
        self._state = WorkerState(silence_limit_s)
        #: With the number of choices of each.
        self._dependents: dict[Failure, int] = {}
        self._choices_at_heartbeat = 0
        #: One heartbeat at a time, so that an older answer never replaces a newer one.
        self._beating = asyncio.Lock()

    def _connect(self) -> None:
        """Makes the channel with the keys of now, and what speaks over it."""
        options = channel_options(self._max_message_bytes)
        self._shown = self._keys() if self._keys else None
        if self._shown is None:
            self.channel = grpc.aio.insecure_channel(self.address, options=options)
        else:
            credentials = channel_credentials(self._shown)
            self.channel = grpc.aio.secure_channel(self.address, credentials, options=[*options, *CHANNEL_OPTIONS])
        self.control: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(self.channel)
        self.prefill: prefill_pb2_grpc.PrefillAsyncStub = prefill_pb2_grpc.PrefillStub(self.channel)
        self.decode: decode_pb2_grpc.DecodeAsyncStub = decode_pb2_grpc.DecodeStub(self.channel)
        #: What a decode worker streams to all requests; opened after a heartbeat.
        self.feed = Feed(self.decode, lambda: self.id)

    @property
    def id(self) -> str:
        return self.status.worker_id if self.status else self.address

    @property
    def key(self) -> str:
        """Names this start of the worker; equal in every router that has heard it."""
        return self.status.instance_id if self.status and self.status.instance_id else self.address

    @property
    def state(self) -> State:
        state = self._state.at(time.monotonic())
        # Whoever took it off its list wants it to get nothing new, and what it serves to be finished.
        return State.DRAINING if state is State.HEALTHY and not self.listed else state

    @property
    def is_needed(self) -> bool:
        """Whether a prompt depends on it, which it may still finish."""
        return bool(self._dependents) and self.state is not State.DEAD

    @property
    def usable(self) -> bool:
        return self.status is not None and self.refused is None and self.state is State.HEALTHY

    @property
    def paused(self) -> bool:
        """It takes no new requests; on a prefill worker: it computes nothing."""
        return self.status is not None and self.status.pause in _PAUSED

    @property
    def described(self) -> worker_pb2.WorkerStatus:
        """The last answer of a worker that is known to have answered."""
        assert self.status is not None, "the worker has never answered a heartbeat"
        return self.status

    @property
    def num_live(self) -> int:
        """Requests on the worker, as the last heartbeat says."""
        load = self.described.load
        return load.running + load.waiting + load.handoffs

    @property
    def load(self) -> int:
        """Choices placed by this router, plus what the last heartbeat says of other routers' choices."""
        if self.status is None:
            return self._num_choices
        reported = self.status.load.running + self.status.load.waiting
        return self._num_choices + max(0, reported - self._choices_at_heartbeat)

    @property
    def _num_choices(self) -> int:
        """Placed by this router."""
        return sum(self._dependents.values())

    def role_mismatch(self) -> str | None:
        """Why the worker cannot serve on the side that lists it."""
        if self.status is None or _SIDE_OF_ROLE.get(self.status.role) == self.side:
            return None
        return f"is listed under --{self.side} and says its role is {types_pb2.Role.Name(self.status.role)}"

    async def heartbeat(self, timeout_s: float) -> None:
        """Asks the worker for its state; a failure counts against it."""
        async with self._beating:
            if self._keys and self._keys() is not self._shown and not self.is_needed:
                self._reconnect()
            await self._heartbeat(timeout_s)
        self.was_asked = True

    async def _heartbeat(self, timeout_s: float) -> None:
        if self.state is State.DEAD and self._refuses():
            self._state.missed()
            return
        try:
            with worker_errors(self.id):
                status = await self.control.Describe(worker_pb2.DescribeRequest(), timeout=timeout_s)
        except MoerelayError as error:
            self._state.missed()
            if self.state is State.DEAD:
                self._fail_dependents(f"worker {self.id} is lost: {error.message}")
            return
        if self.status is not None and self.status.instance_id != status.instance_id:
            self._fail_dependents(f"worker {self.id} was restarted")
            self.breaker = Breaker()
        self.status = status
        self._choices_at_heartbeat = self._num_choices
        self._state.heard(time.monotonic(), draining=status.draining)
        if self.side == "decode" and not status.draining:
            self.feed.open()

    def _refuses(self) -> bool:
        """Whether the last attempt to connect has failed, which a call would tell at greater cost. gRPC goes on."""
        return self.channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.TRANSIENT_FAILURE

    async def abort(self, request: worker_pb2.AbortRequest, timeout_s: float) -> bool:
        """Ends a request, or one of its choices; False if the worker knows no such request. Raises MoerelayError."""
        with worker_errors(self.id):
            return (await self.control.Abort(request, timeout=timeout_s)).found

    async def connect(self, timeout_s: float) -> None:
        """Returns when there is a connection. One that cannot be had makes the worker suspect.

        Raises:
            NotTakenError: nothing was sent to the worker.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected()
        except (TimeoutError, WorkerLostError):
            self.suspect()
            raise NotTakenError(f"worker {self.id} accepts no connection") from None

    async def _connected(self) -> None:
        """Raises WorkerLostError as soon as the worker refuses a connection."""
        state = self.channel.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.READY:
            if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                raise WorkerLostError(f"worker {self.id} refuses connections", unreachable=True)
            await self.channel.wait_for_state_change(state)
            state = self.channel.get_state(try_to_connect=True)

    def drains(self) -> None:
        """A request was refused because the worker drains: it gets no other."""
        self._state.drains()

    def suspect(self) -> None:
        """A request found the worker gone: it gets no other until the next heartbeat is answered."""
        self._state.suspect()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a request's call: every error as a MoerelayError, and a worker that cannot be reached is suspect.

        A worker that reports the loss of another one lives, and goes on serving.
        """
        try:
            with worker_errors(self.id):
                yield
        except WorkerLostError as error:
            if error.unreachable:
                self.suspect()
            raise

    def depend(self, failure: Failure, num_choices: int) -> None:
        """A prompt with so many choices here depends on this worker; `failure` is set if the worker is lost."""
        self._dependents[failure] = num_choices

    def forgo(self, failure: Failure) -> None:
        """It does so no more."""
        del self._dependents[failure]

    def _reconnect(self) -> None:
        """For new keys. A connection goes on with those that it was made with, so nothing of this is urgent."""
        retiring = asyncio.create_task(_retire(self.channel, self.feed), context=Context())
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)
        self._connect()

    async def close(self, grace_s: float | None = None) -> None:
        """Ends calls that are still under way after `grace_s`; none: at once."""
        for retiring in self._retiring:
            retiring.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        await self.feed.close()
        await self.channel.close(grace_s)

    def _fail_dependents(self, message: str) -> None:
        for failure in self._dependents:
            failure.set(WorkerLostError(message))


async def _retire(channel: grpc.aio.Channel, feed: Feed) -> None:
    """Closes a channel that has a successor, once the last call on it has ended: a weight update, say."""
    await feed.close()
    try:
        await channel.close(RETIRE_GRACE_S)
    finally:
        await channel.close()
