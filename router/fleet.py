"""All configured workers: heartbeats, who may be paired with whom, and which pair takes the next choice."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from common.config import RouterSettings
from common.errors import PausedError, UnavailableError
from common.pb import types_pb2, worker_pb2
from common.security.exposure import exposed_worker
from common.security.key_file import KeyFile
from common.security.watched_file import WatchedFile
from router.discovery.listing import Listing
from router.discovery.resolver import Resolver, resolver_of
from router.discovery.roster import Roster
from router.discovery.upkeep import Upkeep
from router.pairing import Member, differences, leader, misfit
from router.placement.subject import Subject
from router.placer import Placer
from router.worker import Side, Worker
from router.worker_state import State, pause_s

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Pair:
    """The workers of one choice; `prefill` is None when the decode worker computes the prompt itself.

    `fallback`: it does so only because no prefill worker is healthy.
    """

    decode: Worker
    prefill: Worker | None
    fallback: bool = False

    @property
    def workers(self) -> Sequence[Worker]:
        """Decode first."""
        return [self.decode] if self.prefill is None else [self.decode, self.prefill]


class Fleet:
    """Only workers with one description of the model serve together: `leader` names it, others are refused."""

    def __init__(
        self,
        settings: RouterSettings,
        resolve: Callable[[str], Resolver | None] = resolver_of,
        keys: WatchedFile[KeyFile] | None = None,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._placer = Placer(settings.placement, max_prefixes=settings.max_prefixes)
        self._was_falling_back = False
        sides: list[tuple[Side, list[str]]] = [("prefill", settings.prefill), ("decode", settings.decode)]
        #: What was configured, and what it stands for now.
        check = None if keys or settings.insecure else exposed_worker
        self.listings = [Listing(side, source, resolve(source), check) for side, sources in sides for source in sources]
        self._roster = Roster(self.listings, self._connect)
        self.workers: Sequence[Worker] = self._roster.workers

    def _connect(self, address: str, side: Side) -> Worker:
        keys = self._keys
        return Worker(
            address,
            side,
            max_message_bytes=self._settings.max_message_bytes,
            silence_limit_s=self._settings.heartbeat_timeout_s,
            keys=(lambda: keys.value) if keys else None,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keeps discovery and heartbeats going; closes every channel at the end."""
        upkeep = Upkeep(self._roster, self._watch, self.review, interval_s=self._settings.discovery_interval_s)
        async with upkeep.running():
            yield

    async def _watch(self, worker: Worker) -> None:
        warned, dead_since = False, time.monotonic()
        while True:
            before, asked_before = worker.state, worker.was_asked
            await worker.heartbeat(self._settings.heartbeat_timeout_s)
            if worker.state is not before:
                log.info("worker_state", worker=worker.id, address=worker.address, state=worker.state)
            elif worker.status is None and not warned:
                warned = True
                log.warning(
                    "worker_never_answered",
                    address=worker.address,
                    side=worker.side,
                    hint="is it started, with keys that fit?",
                )
            if worker.state is not State.DEAD:
                dead_since = time.monotonic()
            if worker.state is not State.DEAD or before is not State.DEAD or not asked_before:
                self.review()  # one that goes on being dead changes nothing, and there may be hundreds
            await asyncio.sleep(pause_s(time.monotonic() - dead_since, self._settings.heartbeat_interval_s))

    async def refresh(self) -> None:
        """Hears every worker once, now."""
        timeout_s = self._settings.heartbeat_timeout_s
        await asyncio.gather(*(worker.heartbeat(timeout_s) for worker in self._roster.members))
        self.review()

    def review(self) -> None:
        """Decides anew who is there and who is refused, and says so when it changes."""
        self.workers = self._roster.workers
        reference = self._reference()
        for worker in self.workers:
            reason = self._refusal(worker, reference)
            if reason and reason != worker.refused:
                log.error("worker_refused", worker=worker.id, address=worker.address, reason=reason)
            elif worker.refused and not reason:
                log.info("worker_accepted", worker=worker.id, address=worker.address)
            worker.refused = reason
        self._tell_fallback()

    def _tell_fallback(self) -> None:
        """Says when decode workers begin to compute all prompts, and when that is over."""
        if self.falls_back() is self._was_falling_back:
            return
        self._was_falling_back = not self._was_falling_back
        if self._was_falling_back:
            log.warning("aggregated_fallback", reason="; ".join(self._complaints()) or "there is no prefill worker")
        else:
            log.info("aggregated_fallback_over", can_serve=self.can_serve())

    def _refusal(self, worker: Worker, reference: worker_pb2.WorkerStatus | None) -> str | None:
        if worker.status is None:
            return None
        own = self._misfit(worker, worker.status)
        if own or reference is None:
            return own
        return "; ".join(differences(reference, worker.status)) or None

    def _misfit(self, worker: Worker, status: worker_pb2.WorkerStatus) -> str | None:
        """Why this router could not use the worker whatever the others are."""
        return worker.role_mismatch() or misfit(status, routing_wanted=self._settings.enable_return_routed_experts)

    def _reference(self) -> worker_pb2.WorkerStatus | None:
        """What workers are compared with; None before any that this router could use has answered."""
        alive = [w for w in self.workers if w.state is not State.DEAD]
        return leader(
            [
                Member(worker.status, healthy=worker.state is State.HEALTHY, draining=worker.state is State.DRAINING)
                for worker in sorted(alive, key=lambda worker: worker.side)  # decode workers first
                if worker.status and self._misfit(worker, worker.status) is None
            ],
            fallback=self.allows_fallback,
        )

    def model(self) -> types_pb2.ModelDescription:
        """The model that requests are checked against. Raises UnavailableError if no pair can serve it now."""
        decode, _ = self._candidates()
        return self._described(decode[0]).model

    def require_pair(self) -> None:
        """Raises UnavailableError if no pair could serve, were none paused."""
        if not self._usable_decode():
            raise UnavailableError(f"no healthy pair of workers: {self._what_is_missing()}")

    def can_serve(self) -> bool:
        """Whether `pick` would find a pair."""
        return bool(self._awake()[0])

    @property
    def allows_fallback(self) -> bool:
        """Whether decode workers may compute prompts while no prefill worker is healthy."""
        return self._settings.allow_aggregated_fallback

    def falls_back(self) -> bool:
        """Whether decode workers compute prompts now only because no prefill worker is healthy."""
        return self._lacks_prefill() and any(not _prefills_itself(worker) for worker in self._usable_decode())

    def num_usable(self) -> dict[Side, int]:
        """Workers that answer and fit, paused or not, of each side that is configured; decode workers in any case."""
        count: dict[Side, int] = {"decode": 0, **{listing.side: 0 for listing in self.listings}}
        for worker in self.workers:
            count[worker.side] += worker.usable
        return count

    def known_model(self) -> types_pb2.ModelDescription | None:
        """The model that is served, or would be; None before any worker that could be used has answered."""
        reference = self._reference()
        return reference.model if reference else None

    def exact(self) -> bool:
        """Whether every usable worker promises bitwise equality."""
        return all(self._described(worker).exact for worker in self.workers if worker.usable)

    def pick(self, subject: Subject, tried: Collection[Worker] = ()) -> Pair:
        """The pair for one prompt.

        `tried`: workers that would not take this prompt. If there are no other prefill workers, decode does without;
        only where `allows_fallback`.

        Raises:
            UnavailableError: no other pair of healthy workers that fit; the message says why.
            PausedError: there are some, and all are paused.
        """
        decode, prefill = self._candidates()
        chosen = self._placer.choose(_others(decode, tried), subject)
        if _prefills_itself(chosen):
            return Pair(chosen, None)
        if self.allows_fallback and all(worker in tried for worker in prefill):
            return Pair(chosen, None, fallback=True)
        return Pair(chosen, self._placer.choose(_others(prefill, tried), subject))

    def subject(self, token_ids: Sequence[int], *, salt: str, session: str | None) -> Subject:
        """What is to be placed, in blocks as the workers cache them. Raises UnavailableError as `model` does."""
        return Subject(token_ids, block_size=self.model().block_size, salt=salt, session=session)

    def _candidates(self) -> tuple[list[Worker], list[Worker]]:
        """Decode workers that may take a choice (at least one), and prefill workers for those that need one."""
        self.require_pair()
        decode, prefill = self._awake()
        if not decode:
            raise PausedError("the cluster is paused and takes no requests until it is resumed")
        return decode, prefill

    def _awake(self) -> tuple[list[Worker], list[Worker]]:
        """Usable workers that are not paused; no decode worker that needs a prefill worker if all of those are."""
        prefill = [worker for worker in self._usable_prefill() if not worker.paused]
        usable = [worker for worker in self._usable_decode() if not worker.paused]
        served = bool(prefill) or self._lacks_prefill()
        return [worker for worker in usable if served or _prefills_itself(worker)], prefill

    def _usable_prefill(self) -> list[Worker]:
        return [w for w in self.workers if w.side == "prefill" and w.usable]

    def _usable_decode(self) -> list[Worker]:
        served = bool(self._usable_prefill()) or self._lacks_prefill()
        return [w for w in self.workers if w.side == "decode" and w.usable and (served or _prefills_itself(w))]

    def _lacks_prefill(self) -> bool:
        """Decode workers have to do without, and may.

        Not while there are prefill workers that are only paused, nor at the start, before all of them have been asked.
        """
        if not self.allows_fallback or self._usable_prefill():
            return False
        return self._roster.was_asked("prefill")

    def _what_is_missing(self) -> str:
        if not self.listings:
            return "none is configured (--prefill, --decode)"
        return "; ".join(self._complaints()) or "no prefill worker is configured and no decode worker has role both"

    def _complaints(self) -> Iterator[str]:
        for listing in self.listings:
            if not listing.addresses:
                reason = f": {listing.failure}" if listing.failure else ""
                yield f"{listing.source} lists no {listing.side} worker{reason}"
        for worker in self.workers:
            if worker.state is not State.HEALTHY:
                yield f"{worker.side} worker {worker.id} is {worker.state}"
            elif worker.refused:
                yield f"{worker.side} worker {worker.id} is refused: {worker.refused}"

    @staticmethod
    def _described(worker: Worker) -> worker_pb2.WorkerStatus:
        assert worker.status is not None, "a usable worker has answered a heartbeat"
        return worker.status


def _others(workers: Sequence[Worker], tried: Collection[Worker]) -> list[Worker]:
    """Those that were not tried. Raises UnavailableError if all were."""
    others = [worker for worker in workers if worker not in tried]
    if not others:
        names = ", ".join(worker.id for worker in workers)
        raise UnavailableError(f"no {workers[0].side} worker takes requests now; tried {names}")
    return others


def _prefills_itself(worker: Worker) -> bool:
    return worker.status is not None and worker.status.role == types_pb2.ROLE_BOTH
