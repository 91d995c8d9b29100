"""A fleet in simulated time: the router's own placement policies over workers that are a queue and a cache each."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random

import numpy as np

from benchmarks.conversations import Conversation
from common.setting_types import PlacementName
from router.placement.policies import POLICIES
from router.placement.policy import Policy
from router.placement.subject import Candidate, Subject
from router.placement.two_choices import TwoChoices

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of one worker of each kind: a mid-size model on one accelerator, in round numbers."""

    prefill_tokens_per_s: float = 8_000.0
    step_s: float = 0.012
    #: What each further sequence adds to a decode step.
    step_per_sequence_s: float = 0.0003
    cached_tokens: int = 200_000


class BlockCache:
    """Which prefixes a worker holds; the least recently used block goes first, of a prefix the last one."""

    def __init__(self, num_tokens: int) -> None:
        self._max_blocks = num_tokens // BLOCK_SIZE
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def hit(self, digests: Sequence[int]) -> int:
        """Blocks of the longest beginning that is there."""
        found = 0
        while found < len(digests) and digests[found] in self._blocks:
            found += 1
        return found

    def keep(self, digests: Sequence[int]) -> None:
        for digest in reversed(digests):
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)


@dataclass(slots=True)
class SimulatedWorker:
    """`work`: tokens that it computed (prefill) or generated (decode)."""

    key: str
    cache: BlockCache
    load: int = 0
    work: int = 0
    free_at: float = 0.0


@dataclass(slots=True)
class Outcome:
    """Of one run; tokens of prompts, and of those the cached ones, on either side."""

    prefill_work: list[int]
    decode_work: list[int]
    num_prompt_tokens: int = 0
    prefill_hits: int = 0
    decode_hits: int = 0
    ttfts_s: list[float] = field(default_factory=list)


class SimulatedFleet:
    """Runs a trace to its end. Every request comes to any of the routers, which know the loads and share nothing."""

    def __init__(
        self,
        name: PlacementName,
        *,
        num_prefill: int,
        num_decode: int,
        num_routers: int,
        speeds: Speeds,
        seed: int = 0,
    ) -> None:
        self._speeds = speeds
        self._chance = Random(seed)
        self._routers = [(self._policy(name), self._policy(name)) for _ in range(num_routers)]
        self._prefill = [self._worker(f"prefill-{i}") for i in range(num_prefill)]
        self._decode = [self._worker(f"decode-{i}") for i in range(num_decode)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._now = 0.0
        self._outcome = Outcome([], [])

    def run(self, trace: Sequence[Conversation]) -> Outcome:
        for conversation in trace:
            self._at(conversation.begins_s, lambda each=conversation: self._ask(each, 0))  # type: ignore[misc]
        while self._events:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        self._outcome.prefill_work = [worker.work for worker in self._prefill]
        self._outcome.decode_work = [worker.work for worker in self._decode]
        return self._outcome

    def _policy(self, name: PlacementName) -> Policy:
        return TwoChoices(self._chance) if name == "two_choices" else POLICIES[name]()

    def _worker(self, key: str) -> SimulatedWorker:
        return SimulatedWorker(key, BlockCache(self._speeds.cached_tokens))

    def _at(self, time_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), happen))

    def _ask(self, conversation: Conversation, turn: int) -> None:
        """A request arrives: decode reserves, prefill computes what it lacks when its turn comes."""
        prompt = conversation.prompt(turn)
        subject = Subject(prompt, block_size=BLOCK_SIZE, session=conversation.name)
        policies = self._chance.choice(self._routers)
        decode = _chosen(policies[1], self._decode, subject)
        prefill = _chosen(policies[0], self._prefill, subject)
        decode.load += 1
        prefill.load += 1
        hit = prefill.cache.hit(subject.digests) * BLOCK_SIZE
        prefill.cache.keep(subject.digests)
        prefill.work += len(prompt) - hit
        self._outcome.num_prompt_tokens += len(prompt)
        self._outcome.prefill_hits += hit
        self._outcome.decode_hits += decode.cache.hit(subject.digests) * BLOCK_SIZE
        compute_s = (len(prompt) - hit) / self._speeds.prefill_tokens_per_s
        prefill.free_at = max(self._now, prefill.free_at) + compute_s
        self._outcome.ttfts_s.append(prefill.free_at - self._now)
        self._at(prefill.free_at, lambda: self._generate(conversation, turn, prefill, decode))

    def _generate(
        self, conversation: Conversation, turn: int, prefill: SimulatedWorker, decode: SimulatedWorker
    ) -> None:
        prefill.load -= 1
        num_tokens = conversation.turns[turn].num_output_tokens
        step_s = self._speeds.step_s + decode.load * self._speeds.step_per_sequence_s
        decode.work += num_tokens
        self._at(self._now + num_tokens * step_s, lambda: self._end(conversation, turn, decode))

    def _end(self, conversation: Conversation, turn: int, decode: SimulatedWorker) -> None:
        decode.load -= 1
        decode.cache.keep(Subject(conversation.until_after(turn), block_size=BLOCK_SIZE).digests)
        if turn + 1 < len(conversation.turns):
            pause_s = conversation.turns[turn + 1].pause_s
            self._at(self._now + pause_s, lambda: self._ask(conversation, turn + 1))


def _chosen(policy: Policy, workers: Sequence[SimulatedWorker], subject: Subject) -> SimulatedWorker:
    key = policy.choose([Candidate(worker.key, worker.load) for worker in workers], subject)
    return next(worker for worker in workers if worker.key == key)


def imbalance(work: Sequence[float]) -> float:
    """The largest share by the mean one; 1 is even."""
    return max(work) / float(np.mean(work)) if any(work) else 1.0
