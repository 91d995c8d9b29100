"""Random arrivals, ends, pools and weights: whatever happens to a request, what it was told is its solo run.

Pools are small, so that sequences are preempted all the time, and keep their KV or not.
"""

from itertools import accumulate, count
from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.engine.objectives import Objectives
from common.engine.request import EngineRequest, RequestId, Work
from common.engine.solo import SoloResult
from common.errors import InvalidRequestError
from common.sampling import FinishReason, SamplingParams
from tests.unit.engine.rig import FakeRig, Transcript, copy_slots, limits, straddling_solo

SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 24),
    min_tokens=st.integers(0, 3),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_p=st.sampled_from([0.8, 1.0]),
    top_k=st.sampled_from([0, 5]),
    seed=st.integers(0, 3),
    stop_token_ids=st.sampled_from([frozenset[int](), frozenset({5, 9, 20})]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 2]),
    n=st.integers(1, 4),
    prompt_logprobs=st.sampled_from([None, 0, 3]),
)
#: Half of them begin as others do, so that blocks are found, shared, evicted and computed again.
SHARED = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
PROMPTS = st.one_of(
    st.lists(st.integers(0, 49), min_size=1, max_size=20),
    st.builds(
        lambda num_shared, own: (SHARED[:num_shared] + own)[:20],
        st.integers(1, len(SHARED)),
        st.lists(st.integers(0, 2), max_size=6),
    ),
)


class EngineMachine(RuleBasedStateMachine):
    """WHOLE, PREFILL and DECODE requests on one small engine; a solo run plays the far side of each handoff."""

    @initialize(
        num_blocks=st.integers(4, 16),
        budget=st.one_of(st.integers(1, 12), st.just(40)),
        seats=st.integers(1, 6),
        swap_space_bytes=st.sampled_from([0, 600, 2**20]),  # a position takes 20
        prefix_caching=st.booleans(),
        itl_s=st.sampled_from([None, 1e-9, 0.5]),
        seed=st.integers(0, 9),
    )
    def build(
        self,
        num_blocks: int,
        budget: int,
        seats: int,
        swap_space_bytes: int,
        prefix_caching: bool,
        itl_s: float | None,
        seed: int,
    ) -> None:
        """With an objective that cannot be kept, or often is not: time goes on by anything between two looks."""
        bounds = limits(
            max_num_batched_tokens=budget,
            max_num_seqs=seats,
            swap_space_bytes=swap_space_bytes,
            objectives=Objectives(itl_s=itl_s),
        )
        draw = Random(seed)
        clock = accumulate(draw.choice([1e-6, 0.01, 0.3, 2.0]) for _ in count())
        self.rig = FakeRig(num_blocks=num_blocks, bounds=bounds, prefix_caching=prefix_caching, clock=clock.__next__)
        self.cancelled: set[RequestId] = set()
        self.budget = budget
        self.count = 0

    @rule(
        prompt=PROMPTS,
        sampling=SAMPLING,
        start=st.sampled_from([None, 0, 1]),
        work=st.sampled_from(Work),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "", "", "salt"]),
        local=st.sampled_from([0, 3, 20]),
    )
    def submit(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        start: int | None,
        work: Work,
        priority: int,
        salt: str,
        local: int,
    ) -> None:
        self.count += 1
        name = RequestId(f"r{self.count}")
        request = EngineRequest(
            name, prompt, sampling, start, work, priority, cache_salt=salt, local_prefill_max_tokens=local
        )
        if -(-request.num_slots // 4) > self.rig.pool.num_usable_blocks:
            self._expect_refusal(request)
        else:
            self.rig.submit(request)

    @rule(
        prompts=st.lists(PROMPTS, min_size=3, max_size=4),
        max_tokens=st.integers(10, 24),
        n=st.integers(1, 2),
        priorities=st.permutations(range(4)),
    )
    def crowd(self, prompts: list[list[int]], max_tokens: int, n: int, priorities: list[int]) -> None:
        """Long answers that begin side by side, and outgrow the pool."""
        sampling = SamplingParams(max_tokens, n=n, temperature=1.5, ignore_eos=True)
        for prompt, priority in zip(prompts, priorities, strict=False):
            self.submit(prompt[:6], sampling, 0, Work.WHOLE, priority, "", 0)
        self.step(8)

    def _expect_refusal(self, request: EngineRequest) -> None:
        try:
            self.rig.submit(request)
        except InvalidRequestError:
            return
        raise AssertionError("a request that can never fit was let in")

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.rig.step()

    @precondition(lambda self: self.live())
    @rule(data=st.data(), silently=st.booleans())
    def end(self, data: st.DataObject, silently: bool) -> None:
        transcript = data.draw(st.sampled_from(self.live()))
        name = transcript.request.request_id
        if silently:
            self.rig.cancel(name)
            self.cancelled.add(name)
        else:
            self.rig.core.abort(name)
            self.rig.deliver()

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def abort_one_choice(self, data: st.DataObject) -> None:
        transcript = data.draw(st.sampled_from(self.live()))
        choice = data.draw(st.integers(0, transcript.request.sampling.n))
        self.rig.core.abort(transcript.request.request_id, choice)
        self.rig.deliver()

    @rule()
    def forget_prefixes(self) -> None:
        self.rig.core.reset_prefix_cache()
        assert self.rig.core.load().kv_blocks_cached == 0

    @rule()
    def update_weights(self) -> None:
        """As the engine does: only when no prompt is under way and nothing is computed again."""
        core = self.rig.core
        core.close_admission()
        known = [len(t.request.prompt) + len(t.tokens) for transcript in self.live() for t in transcript.all]
        most = sum(known) // self.budget + len(known)
        steps = 0
        while core.has_open_prompts() and self.rig.step():
            steps += 1
        if not any(t.blocks and t.request.work is not Work.WHOLE for t in self.live()):  # held for another engine
            assert not core.has_open_prompts()
            assert steps <= most
        if not core.has_open_prompts():
            self.rig.runner.weights += 1
            core.weight_version = str(self.rig.runner.weights)
        core.open_admission()

    @precondition(lambda self: self.leased())
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        """Another engine computed a prompt, maybe with earlier weights: its KV, rows and first tokens arrive."""
        transcript = data.draw(st.sampled_from(self.leased()))
        request = transcript.request
        bounds = limits(max_num_batched_tokens=data.draw(st.integers(1, 20)))
        # What was cached here is of the weights in use; a handoff of others that builds on it is refused.
        oldest = self.rig.runner.weights if transcript.num_leased_cached else 0
        weights = data.draw(st.integers(oldest, self.rig.runner.weights))
        far = FakeRig(bounds=bounds, weights=weights)
        far.core.weight_version = str(weights or "")
        there = far.submit(
            EngineRequest(request.request_id, request.prompt, request.sampling, request.routing_start, Work.PREFILL)
        )
        far.run()
        copy_slots(far.store, there, self.rig.store, transcript)
        for advance in there.advances:
            if advance.computed > transcript.num_leased_cached:
                self.rig.core.advance_handoff(request.request_id, advance.computed)
        self.rig.core.commit_handoff(request.request_id, there.first_tokens, there.num_cached)
        self.rig.deliver()

    @invariant()
    def is_consistent(self) -> None:
        if self.count:
            assert self.rig.core.check_invariants() == []

    def live(self) -> list[Transcript]:
        everybody = self.rig.transcripts.values()
        return [t for t in everybody if not t.request_ended and t.request.request_id not in self.cancelled]

    def leased(self) -> list[Transcript]:
        return [
            t for t in self.live() if t.request.work is Work.DECODE and t.blocks and not any(c.tokens for c in t.all)
        ]

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.finish_everything()
        for transcript in self.rig.transcripts.values():
            complete = transcript.request.request_id not in self.cancelled
            check_against_solo(transcript, complete=complete, newest=self.rig.runner.weights)
        self.rig.assert_baseline()

    def finish_everything(self) -> None:
        """Serves what can be served; then lets go of what waits for another engine, until nothing is left."""
        self.rig.run()
        while held := [t for t in self.live() if t.request.work is not Work.WHOLE and t.blocks]:
            for transcript in held:
                self.rig.cancel(transcript.request.request_id)
                self.cancelled.add(transcript.request.request_id)
            self.rig.run()


def check_against_solo(transcript: Transcript, *, complete: bool, newest: int) -> None:
    """Everything told is a prefix of the solo runs, and all of it if the request ended by itself."""
    assert transcript.error is None
    if transcript.request.work is not Work.PREFILL:
        for choice in transcript.all:
            check_choice(choice, complete=complete, newest=newest)
    elif transcript.first_tokens:
        versions = [transcript.first_tokens[0].weight_version]
        expected = [straddling_solo(transcript.request, versions, i) for i in range(transcript.request.sampling.n)]
        assert list(transcript.first_tokens) == [e.tokens[0] for e in expected]
        assert are_logprobs_of(transcript, expected[0])
    else:
        assert any(are_logprobs_of(transcript, run) for run in runs_of_each(transcript, newest))


def check_choice(transcript: Transcript, *, complete: bool, newest: int) -> None:
    if not transcript.tokens:  # of its prompt at most
        assert transcript.finish is None or transcript.finish.reason is FinishReason.ABORT
        runs = runs_of_each(transcript, newest)
        assert any(are_rows_of(transcript, run) and are_logprobs_of(transcript, run) for run in runs)
    else:
        expected = straddling_solo(
            transcript.request, [token.weight_version for token in transcript.tokens], transcript.choice
        )
        assert tuple(transcript.tokens) == expected.tokens[: len(transcript.tokens)]
        assert are_rows_of(transcript, expected)
        assert are_logprobs_of(transcript, expected)
        if transcript.finish is not None and transcript.finish.reason is not FinishReason.ABORT:
            transcript.assert_equals(expected)
    assert transcript.finish is not None or not complete


def runs_of_each(transcript: Transcript, newest: int) -> list[SoloResult]:
    """What the choice would be under each of the weights that were in use."""
    return [straddling_solo(transcript.request, [str(w or "")], transcript.choice) for w in range(newest + 1)]


def are_rows_of(transcript: Transcript, expected: SoloResult) -> bool:
    told = transcript.rows_TLK
    return told is None or (
        expected.rows_TLK is not None and told.tobytes() == expected.rows_TLK[: len(told)].tobytes()
    )


def are_logprobs_of(transcript: Transcript, expected: SoloResult) -> bool:
    told, want = transcript.prompt_logprobs, expected.prompt_logprobs
    return told is None or (want is not None and told.tobytes() == want[: len(told)].tobytes())


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
