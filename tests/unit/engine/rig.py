"""What the engine tests share: an engine core driven step by step, and one request's side of the story."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from common.engine.admission import Admission
from common.engine.core import EngineCore
from common.engine.limits import EngineLimits
from common.engine.objectives import Objectives
from common.engine.request import (
    BlocksLeased,
    EngineEvent,
    EngineRequest,
    Failed,
    PrefillsLocally,
    Progress,
    PromptAdvanced,
    RequestId,
    Work,
)
from common.engine.solo import SoloResult, SoloRunner
from common.errors import MoerelayError
from common.kv.pool import BlockId, BlockPool
from common.kv.store import KVStore, slots_of
from common.model.batch import Chunk, Runner, StepOutput
from common.prompt_logprobs import PromptLogprobs
from common.routing.record import RoutingArray
from common.sampling import Finish, SampledToken, SamplingParams
from tests.fakes.fake_runner import EOS_TOKEN_ID, VOCAB_SIZE, FakeRunner, fake_store

EOS = frozenset({EOS_TOKEN_ID})


def limits(
    *,
    max_num_batched_tokens: int = 16,
    max_num_seqs: int = 8,
    max_waiting: int = 100,
    max_model_len: int = 128,
    swap_space_bytes: int = 2**20,
    exact: bool = True,
    objectives: Objectives | None = None,
) -> EngineLimits:
    return EngineLimits(
        max_num_batched_tokens,
        max_num_seqs,
        max_waiting,
        max_model_len,
        VOCAB_SIZE,
        swap_space_bytes,
        exact,
        objectives or Objectives(),
    )


def make_request(
    name: str, prompt: list[int], sampling: SamplingParams, *, start: int | None = 0, work: Work = Work.WHOLE
) -> EngineRequest:
    return EngineRequest(RequestId(name), prompt, sampling, start, work)


def greedy(max_tokens: int, *, ignore_eos: bool = True) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=ignore_eos)


def solo(request: EngineRequest, choice: int = 0, *, weights: int = 0, version: str = "") -> SoloResult:
    """The oracle's answer, from a store of its own."""
    store = fake_store(64)
    oracle = SoloRunner(FakeRunner(store, weights), store, EOS, weight_version=version)
    return oracle.run(request.prompt, request.sampling, request.routing_start, choice=choice, matcher=request.matcher)


def straddling_solo(request: EngineRequest, versions: Sequence[str], choice: int = 0) -> SoloResult:
    """The oracle's answer when each token is sampled under the weights of that label; the last one for all others.

    The weights of a label are its number, and those of none are number 0.
    """
    store = fake_store(64)
    runner = _ChangingRunner(store, [int(version or 0) for version in versions])
    result = SoloRunner(runner, store, EOS).run(
        request.prompt, request.sampling, request.routing_start, choice=choice, matcher=request.matcher
    )
    labels = [*versions, *[versions[-1]] * len(result.tokens)]
    tokens = (
        msgspec.structs.replace(token, weight_version=label)
        for token, label in zip(result.tokens, labels, strict=False)
    )
    return replace(result, tokens=tuple(tokens))


class _ChangingRunner(FakeRunner):
    """Has other weights in every step."""

    def __init__(self, store: KVStore, weights: Sequence[int]) -> None:
        super().__init__(store)
        self._weights = weights

    def execute(self, chunks: Sequence[Chunk]) -> StepOutput:
        self.weights = self._weights[min(len(self.batches), len(self._weights) - 1)]
        return super().execute(chunks)


@dataclass
class Transcript:
    """Everything one choice was told; checks the row rule with every event. That of choice 0 is the request's too."""

    request: EngineRequest
    choice: int = 0
    tokens: list[SampledToken] = field(default_factory=list)
    rows: list[RoutingArray] = field(default_factory=list)
    logprobs: list[PromptLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    error: MoerelayError | None = None
    blocks: tuple[BlockId, ...] | None = None
    advances: list[PromptAdvanced] = field(default_factory=list)
    num_events: int = 0
    #: Of the prompt, on a decode engine: positions that came from its own prefix cache.
    num_leased_cached: int = 0
    #: What the first token said of the request's prompt.
    num_cached: int = 0
    #: On a decode engine: no handoff is awaited.
    is_local: bool = False

    def __post_init__(self) -> None:
        others = range(1, self.request.sampling.n) if self.choice == 0 else ()
        #: Of all choices, this one first.
        self.all = [self, *(Transcript(self.request, i) for i in others)]

    def take(self, event: EngineEvent) -> None:
        assert not self.request_ended, f"{event} after the end"
        self.num_events += 1
        match event:
            case BlocksLeased():
                assert self.blocks is None
                self.blocks = event.blocks
                self.num_leased_cached = event.num_cached
            case PrefillsLocally():
                assert self.request.work is Work.DECODE
                assert not self.blocks
                self.is_local = True
            case PromptAdvanced():
                self.blocks = event.blocks
                self.advances.append(event)
                self.num_cached = event.num_cached
                self._take_logprobs(event.prompt_logprobs)
            case Progress():
                self._take_logprobs(event.prompt_logprobs)
                if event.tokens and self.is_whole:
                    self.assert_all_logprobs()
                self.all[event.choice]._take_progress(event)
            case Failed():
                for transcript in self.all:
                    transcript.error = event.error

    def _take_progress(self, event: Progress) -> None:
        assert self.finish is None, f"{event} after the choice's end"
        self.tokens += event.tokens
        self.finish = event.finish
        self.num_cached += event.num_cached
        if event.rows_TLK is not None:
            assert self.request.routing_start is not None
            self.rows.append(event.rows_TLK)
        if event.tokens and self.request.routing_start is not None:
            want = len(self.request.prompt) - self.request.routing_start + len(self.tokens) - 1
            assert sum(len(r) for r in self.rows) == want

    def _take_logprobs(self, logprobs: PromptLogprobs | None) -> None:
        if logprobs is not None:
            self.logprobs.append(logprobs)

    def assert_all_logprobs(self) -> None:
        """All of the prompt's positions have been told, if the request asked for them."""
        wanted = 0 if self.request.sampling.prompt_logprobs is None else len(self.request.prompt)
        assert sum(len(part) for part in self.logprobs) == wanted

    @property
    def is_whole(self) -> bool:
        """The engine that tells this computes the prompt too."""
        return self.request.work is Work.WHOLE or self.is_local

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        return PromptLogprobs(np.concatenate(self.logprobs)) if self.logprobs else None

    @property
    def first_tokens(self) -> tuple[SampledToken, ...]:
        """What a prefill ended with; empty before."""
        return self.advances[-1].first_tokens if self.advances else ()

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.error is not None

    @property
    def request_ended(self) -> bool:
        return all(transcript.ended for transcript in self.all)

    @property
    def rows_TLK(self) -> RoutingArray | None:
        rows_TLK: RoutingArray | None = np.concatenate(self.rows) if self.rows else None
        return rows_TLK

    def assert_equals(self, expected: SoloResult) -> None:
        assert self.error is None
        assert tuple(self.tokens) == expected.tokens
        assert self.finish == expected.finish
        if expected.rows_TLK is None:
            assert not self.rows
        else:
            np.testing.assert_array_equal(self.rows_TLK, expected.rows_TLK, strict=True)
        if self.choice == 0 and self.is_whole and expected.prompt_logprobs is not None:
            np.testing.assert_array_equal(self.prompt_logprobs, expected.prompt_logprobs, strict=True)


class CoreRig:
    """One engine core on any model, and the transcripts of its requests."""

    def __init__(
        self,
        runner: Runner,
        store: KVStore,
        bounds: EngineLimits,
        eos_token_ids: frozenset[int],
        *,
        prefix_caching: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.pool = BlockPool(store.num_blocks)
        self.admission = Admission(
            bounds, num_usable_blocks=self.pool.num_usable_blocks, block_size=store.layout.block_size, clock=clock
        )
        self.core = EngineCore(
            runner, store, self.pool, bounds, eos_token_ids, self.admission, prefix_caching=prefix_caching, clock=clock
        )
        self.transcripts: dict[RequestId, Transcript] = {}
        self.silenced: set[RequestId] = set()

    def submit(self, request: EngineRequest) -> Transcript:
        self.admission.enter(request)
        self.core.add(request)
        transcript = self.transcripts[request.request_id] = Transcript(request)
        self.silenced.discard(request.request_id)
        return transcript

    def step(self) -> bool:
        """One step; its events go to the transcripts; everything must still be consistent."""
        moved = self.core.step()
        self.deliver()
        assert self.core.check_invariants() == []
        return moved

    def deliver(self) -> None:
        for event in self.core.take_events():
            assert event.request_id not in self.silenced, f"{event} after a cancel"
            self.transcripts[event.request_id].take(event)

    def cancel(self, request_id: RequestId) -> None:
        self.core.cancel(request_id)
        self.silenced.add(request_id)

    def run(self) -> None:
        """Steps until nothing can move."""
        while self.step():
            pass

    def assert_baseline(self) -> None:
        """Nothing is held by anybody."""
        load = self.core.load()
        assert (load.running, load.waiting, load.handoffs, load.kv_blocks_used) == (0, 0, 0, 0)
        assert (load.preempted, load.swap_bytes_used) == (0, 0)
        assert self.core.check_invariants() == []
        assert self.admission.close() == []


class FakeClock:
    """Stands still unless somebody moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowRunner(FakeRunner):
    """Takes `cost` of each batch, by a fake clock. Remembers what it took."""

    def __init__(self, store: KVStore, clock: FakeClock, cost: Callable[[Sequence[Chunk]], float]) -> None:
        super().__init__(store)
        self.cost = cost
        self.seconds: list[float] = []
        self._clock = clock

    def execute(self, chunks: Sequence[Chunk]) -> StepOutput:
        self.seconds.append(self.cost(chunks))
        self._clock.now += self.seconds[-1]
        return super().execute(chunks)


class SlowRig(CoreRig):
    """An engine core whose steps take time, by a clock of its own."""

    def __init__(
        self, cost: Callable[[Sequence[Chunk]], float], *, num_blocks: int = 256, bounds: EngineLimits | None = None
    ) -> None:
        store = fake_store(num_blocks + 1)
        self.clock = FakeClock()
        self.runner = SlowRunner(store, self.clock, cost)
        super().__init__(self.runner, store, bounds or limits(), EOS, clock=self.clock)


class FakeRig(CoreRig):
    """An engine core on FakeRunner, with `num_blocks` usable blocks."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        bounds: EngineLimits | None = None,
        block_size: int = 4,
        prefix_caching: bool = True,
        weights: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        store = fake_store(num_blocks + 1, block_size)
        self.runner = FakeRunner(store, weights)
        super().__init__(self.runner, store, bounds or limits(), EOS, prefix_caching=prefix_caching, clock=clock)


def copy_slots(source: KVStore, there: Transcript, target: KVStore, here: Transcript) -> None:
    """What a handoff does: KV and rows of the positions that P has so far and D lacks, from its slots to D's."""
    assert there.blocks is not None
    assert here.blocks is not None
    start, computed = here.num_leased_cached, there.advances[-1].computed
    if start >= computed:
        return
    from_slots = slots_of(there.blocks, start, computed, source.layout.block_size)
    to_slots = slots_of(here.blocks, start, computed, target.layout.block_size)
    target.write_kv(to_slots, source.read_kv(from_slots))
    if there.request.routing_start is not None:
        target.write_rows(to_slots, source.read_rows(from_slots))


class RigPair:
    """P and D, and the handoffs between them."""

    def __init__(self, prefill: CoreRig, decode: CoreRig) -> None:
        self.prefill = prefill
        self.decode = decode

    def start(self, request: EngineRequest) -> Transcript:
        """D leases, then P begins; returns D's side."""
        transcript = self.decode.submit(replace(request, work=Work.DECODE))
        self.decode.step()
        self.prefill.submit(replace(request, work=Work.PREFILL))
        return transcript

    def hand_over(self, name: RequestId) -> None:
        """Moves the whole prompt, chunk by chunk, then the first tokens; P lets go."""
        there, here = self.prefill.transcripts[name], self.decode.transcripts[name]
        while not there.first_tokens:
            self.prefill.step()
            if there.advances:
                copy_slots(self.prefill.store, there, self.decode.store, here)
                if there.advances[-1].computed > here.num_leased_cached:
                    self.decode.core.advance_handoff(name, there.advances[-1].computed)
                    self.decode.deliver()
        there.assert_all_logprobs()
        self.decode.core.commit_handoff(name, there.first_tokens, there.num_cached)
        self.decode.deliver()
        self.prefill.cancel(name)
