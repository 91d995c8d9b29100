"""Sequences that lose their blocks and go on later: nobody can tell from their tokens and rows."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import structlog
import torch
from structlog.typing import EventDict

from common.engine.request import EngineRequest, RequestId, Work
from common.errors import InternalError
from common.kv.store import KVStore, SlotArray, slots_of
from common.model.batch import Chunk, StepOutput
from common.sampling import Finish, FinishReason, SamplingParams
from tests.fakes.fake_runner import ROUTING, FakeRunner, fake_store
from tests.unit.engine.rig import (
    EOS,
    CoreRig,
    FakeRig,
    RigPair,
    Transcript,
    greedy,
    limits,
    make_request,
    solo,
    straddling_solo,
)

#: KV and row of one position of FakeRunner.
TOKEN_BYTES, ROW_BYTES = 16, 4
POSITION_BYTES = TOKEN_BYTES + ROW_BYTES
NOTHING, PLENTY = 0, 2**20


@pytest.fixture
def logs() -> Iterator[list[EventDict]]:
    """What was logged; the names of preempted requests are read from it."""
    with structlog.testing.capture_logs() as entries:
        yield entries


def preempted(logs: Sequence[EventDict]) -> list[str]:
    return [str(entry["request"]) for entry in logs if entry["event"] == "preempted"]


def prompt_of(length: int, first: int = 3) -> list[int]:
    return [3 + (first + 7 * i) % 40 for i in range(length)]


def rig_of(
    num_blocks: int, *, swap: int = PLENTY, block_size: int = 4, prefix_caching: bool = True, seats: int = 8
) -> FakeRig:
    bounds = limits(max_num_seqs=seats, swap_space_bytes=swap)
    return FakeRig(num_blocks=num_blocks, block_size=block_size, bounds=bounds, prefix_caching=prefix_caching)


def assert_solo(*transcripts: Transcript) -> None:
    for transcript in transcripts:
        for choice in transcript.all:
            choice.assert_equals(solo(transcript.request, choice.choice))


def run_until_preempted(rig: FakeRig, count: int = 1) -> None:
    while rig.core.stats.preemptions < count:
        assert rig.step()


def two_that_do_not_fit(rig: FakeRig, num_prompt: int = 6, **fields: object) -> tuple[Transcript, Transcript]:
    """Two requests of 5 blocks each, of which the second one has been preempted. The pool has 6 or 7 blocks."""
    first, second = (
        make_request("a", prompt_of(6, 0), greedy(14)),
        make_request("b", prompt_of(num_prompt, 1), greedy(14)),
    )
    transcripts = rig.submit(first), rig.submit(replace(second, **fields))  # type: ignore[arg-type]
    run_until_preempted(rig)
    return transcripts


# --- the answers


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("swap", [NOTHING, 50 * POSITION_BYTES, PLENTY])
def test_every_row_survives_preemption(swap: int, prefix_caching: bool) -> None:
    """vllm-project/vllm#39917, #39568: 6 requests of 90 positions each in a pool of 192."""
    rig = rig_of(12, swap=swap, block_size=16, prefix_caching=prefix_caching)
    got = [rig.submit(make_request(f"r{i}", prompt_of(30, i), greedy(60))) for i in range(6)]
    rig.run()
    assert rig.core.stats.preemptions > 0
    for transcript in got:
        assert transcript.rows_TLK is not None
        assert len(transcript.rows_TLK) == 30 + 60 - 1
    assert_solo(*got)
    rig.assert_baseline()


@pytest.mark.parametrize("swap", [NOTHING, PLENTY])
def test_a_pool_of_one_and_a_half_requests_does_not_thrash(swap: int) -> None:
    """vllm-project/vllm#25538."""
    rig = rig_of(9, swap=swap, block_size=16)
    got = [rig.submit(make_request(f"r{i}", prompt_of(16, i), greedy(81))) for i in range(4)]
    rig.run()
    assert_solo(*got)
    assert 0 < rig.core.stats.preemptions < 20


@pytest.mark.parametrize("swap", [NOTHING, PLENTY])
def test_a_request_is_preempted_twice(swap: int, logs: list[EventDict]) -> None:
    """By two more urgent ones that come one after the other, and have grown to 10 of 12 blocks when they end."""
    rig = rig_of(12, swap=swap)
    victim = rig.submit(replace(make_request("victim", prompt_of(4), greedy(40)), priority=5))
    for i in range(2):
        rig.step()
        urgent = rig.submit(make_request(f"urgent{i}", prompt_of(1, i), greedy(40)))
        while not urgent.ended or rig.core.load().preempted:
            rig.step()
        assert_solo(urgent)
    rig.run()
    assert preempted(logs) == ["victim", "victim"]
    assert_solo(victim)
    rig.assert_baseline()


@pytest.mark.parametrize("swap", [NOTHING, 30 * POSITION_BYTES, PLENTY])
@pytest.mark.parametrize("num_prompt", [3, 4, 7, 8])
@pytest.mark.parametrize("spare", [0, 1, 3])
def test_choices_are_preempted_one_by_one(spare: int, num_prompt: int, swap: int) -> None:
    sampling = SamplingParams(14, n=5, temperature=1.5, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    request = make_request("a", prompt_of(num_prompt), sampling)
    rig = rig_of(-(-request.num_slots // 4) + spare, swap=swap)
    got, late = rig.submit(request), rig.submit(make_request("late", prompt_of(2), replace(sampling, n=2)))
    rig.run()
    assert rig.core.stats.preemptions > 0
    assert_solo(got, late)
    rig.assert_baseline()


def test_a_handoff_is_preempted_twice_on_decode(logs: list[EventDict]) -> None:
    """sgl-project/sglang#25372, #40730; LMCache/LMCache#1361: prompts from two prefill workers."""
    decode = rig_of(12)
    pairs = [RigPair(rig_of(64), decode) for _ in range(2)]
    victim = replace(make_request("victim", prompt_of(4), greedy(40)), priority=5)
    got = pairs[0].start(victim)
    pairs[0].hand_over(victim.request_id)
    for i in range(2):
        urgent = make_request(f"urgent{i}", prompt_of(1, i), greedy(40))
        transcript = pairs[1].start(urgent)
        pairs[1].hand_over(urgent.request_id)
        while not transcript.ended or decode.core.load().preempted:
            decode.step()
        assert_solo(transcript)
    decode.run()
    assert preempted(logs) == ["victim", "victim"]
    assert_solo(got)
    decode.assert_baseline()


# --- who gives way


def test_the_least_urgent_gives_way(logs: list[EventDict]) -> None:
    rig = rig_of(8)
    priorities = {"late": 0, "urgent": -1, "patient": 7}
    requests = [
        replace(make_request(name, prompt_of(4, priority), greedy(20)), priority=priority)
        for name, priority in priorities.items()
    ]
    got = [rig.submit(request) for request in requests]
    rig.run()
    assert_solo(*got)
    assert preempted(logs)[0] == "patient"
    assert "urgent" not in preempted(logs)
    ends = [entry for entry in logs if entry["event"] == "preempted"]
    assert ends[0]["kind"] == "swapped"
    assert ends[0]["choice"] == 0
    assert 4 < ends[0]["tokens"] < 24


def test_the_earliest_finishes_without_being_preempted(logs: list[EventDict]) -> None:
    rig = rig_of(8)
    got = [rig.submit(make_request(f"r{i}", prompt_of(5, i), greedy(24))) for i in range(6)]
    rig.run()
    assert_solo(*got)
    assert preempted(logs)
    assert "r0" not in preempted(logs)


def test_leases_and_held_prefills_never_give_way(logs: list[EventDict]) -> None:
    """What others write and read stays where it is: the only decoding sequence waits for them instead."""
    rig = rig_of(7)
    decodes = rig.submit(make_request("decodes", prompt_of(4), greedy(16)))
    rig.step()
    leased = rig.submit(make_request("leased", prompt_of(8), greedy(1), work=Work.DECODE))
    rig.submit(make_request("held", prompt_of(8, 1), greedy(9), work=Work.PREFILL))
    rig.run()
    assert preempted(logs) == ["decodes"]
    assert leased.blocks is not None
    assert not decodes.ended
    rig.cancel(RequestId("held"))
    rig.run()
    assert_solo(decodes)
    rig.cancel(RequestId("leased"))
    rig.assert_baseline()


def test_choices_that_wait_give_their_prompt_up_for_whoever_is_more_urgent() -> None:
    """One seat, free; its choices hold 2 of 5 blocks, and the head of the line needs 4: nobody else can run."""
    rig = rig_of(5, seats=1)
    request = make_request("a", prompt_of(8), SamplingParams(3, n=3, temperature=1.5, ignore_eos=True))
    got = rig.submit(request)
    rig.step()
    urgent = rig.submit(replace(make_request("urgent", prompt_of(16, 1), greedy(3)), priority=-1))
    rig.core.abort(RequestId("a"), 0)
    rig.run()
    assert rig.core.stats.preemptions == 2
    assert_solo(urgent)
    for choice in got.all[1:]:
        choice.assert_equals(solo(request, choice.choice))
    rig.assert_baseline()


def test_the_last_to_run_gives_way_to_a_choice_that_can_run_then() -> None:
    """A lease of 2 of 8 blocks stays. "a" grows to 4, finds no fifth, and leaves; the choice needs nobody's command."""
    rig = rig_of(8)
    a = rig.submit(make_request("a", prompt_of(4), greedy(21)))
    rig.submit(make_request("lease", prompt_of(8, 2), greedy(1), work=Work.DECODE))
    rig.step()
    sampling = SamplingParams(16, n=2, temperature=1.5, ignore_eos=True)
    urgent = rig.submit(replace(make_request("urgent", prompt_of(8, 1), sampling), priority=-1))
    rig.step()
    rig.core.abort(RequestId("urgent"), 0)
    rig.step()
    assert (rig.core.load().running, rig.core.load().waiting) == (1, 1)
    rig.run()
    urgent.all[1].assert_equals(solo(urgent.request, 1))
    assert_solo(a)
    rig.cancel(RequestId("lease"))
    rig.assert_baseline()


def test_waiting_choices_keep_a_prompt_that_would_not_become_free() -> None:
    """The seated sibling holds it as well: copying it for each of them would gain nothing."""
    rig = rig_of(8, seats=2)
    sampling = SamplingParams(16, n=4, temperature=1.5, ignore_eos=True)
    got = rig.submit(make_request("a", prompt_of(8), sampling))
    rig.step()
    rig.submit(make_request("lease", prompt_of(12), greedy(1), work=Work.DECODE))
    rig.core.abort(RequestId("a"), 1)
    run_until_preempted(rig)
    assert rig.core.stats.preemptions == 1
    rig.cancel(RequestId("lease"))
    rig.run()
    for choice in (0, 2, 3):
        got.all[choice].assert_equals(solo(got.request, choice))
    rig.assert_baseline()


# --- memory


class WatchedStore(KVStore):
    """Counts the slots of each read of KV, and fails while `fails` is set, but not in a forward pass."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(fake_store(2).layout, ROUTING, num_blocks + 1, torch.device("cpu"), poison=True)
        self.fails = False
        self.reads: list[int] = []

    def read_kv(self, slots: SlotArray) -> torch.Tensor:
        self.reads.append(len(slots))
        if self.fails:
            raise RuntimeError("out of memory")
        return super().read_kv(slots)


class CalmRunner(FakeRunner):
    def __init__(self, store: WatchedStore) -> None:
        super().__init__(store)
        self._watched = store

    def execute(self, chunks: Sequence[Chunk]) -> StepOutput:
        fails, self._watched.fails = self._watched.fails, False
        output = super().execute(chunks)
        self._watched.fails = fails
        return output


def watched_rig(num_blocks: int, seats: int = 8) -> tuple[CoreRig, WatchedStore]:
    store = WatchedStore(num_blocks)
    return CoreRig(CalmRunner(store), store, limits(max_num_seqs=seats), EOS), store


@pytest.mark.parametrize(
    ("swap", "kinds"), [(NOTHING, {False}), (40 * POSITION_BYTES, {True, False}), (PLENTY, {True})]
)
def test_saved_memory_is_bounded(swap: int, kinds: set[bool]) -> None:
    rig = rig_of(12, swap=swap)
    got = [rig.submit(make_request(f"r{i}", prompt_of(6, i), greedy(22))) for i in range(8)]
    highest = 0
    while rig.step():
        highest = max(highest, rig.core.load().swap_bytes_used)
    assert highest <= swap
    stats = rig.core.stats
    assert {True: stats.preemptions_swapped > 0, False: stats.preemptions_recomputed > 0} == {
        kind: kind in kinds for kind in (True, False)
    }
    assert stats.preemptions == stats.preemptions_swapped + stats.preemptions_recomputed
    assert (stats.swapped_tokens > 0, stats.recomputed_tokens > 0) == (True in kinds, False in kinds)
    assert_solo(*got)
    rig.assert_baseline()


def test_saved_bytes_are_those_of_kv_and_of_rows_that_are_wanted() -> None:
    for start, size in ((0, POSITION_BYTES), (None, TOKEN_BYTES)):
        rig = rig_of(7)
        two_that_do_not_fit(rig, routing_start=start)
        assert rig.core.load().swap_bytes_used == rig.core.stats.swapped_tokens * size > 0
        assert (rig.core.load().preempted, rig.core.load().waiting) == (1, 1)
        rig.run()
        rig.assert_baseline()


def test_choices_that_give_their_prompt_up_together_share_its_copy() -> None:
    rig, store = watched_rig(5, seats=1)
    rig.submit(make_request("a", prompt_of(8), SamplingParams(3, n=4, temperature=1.5, ignore_eos=True)))
    rig.step()
    rig.submit(replace(make_request("urgent", prompt_of(16, 1), greedy(3)), priority=-1))
    rig.core.abort(RequestId("a"), 0)
    store.reads.clear()
    rig.step()
    assert rig.core.stats.preemptions_swapped == 3
    assert store.reads == [8, 16]  # the copy, and the forward pass
    rig.run()
    rig.assert_baseline()


def test_blocks_that_were_taken_are_ruined_and_what_comes_back_is_whole() -> None:
    """The store poisons what is free: one byte read from a block that is gone would make the logits NaN."""
    rig = rig_of(7, prefix_caching=False)
    a, b = two_that_do_not_fit(rig)
    blocks = rig.runner.batches[-2][1].blocks
    held = rig.runner.batches[-1][0].blocks
    lost = [block for block in blocks if block not in held]
    assert len(lost) >= 2
    assert rig.store.read_kv(slots_of(lost, 0, 4 * len(lost), 4)).isnan().all()
    rig.run()
    assert_solo(a, b)


def test_the_cached_beginning_is_shared_and_not_recomputed() -> None:
    rig = rig_of(6, swap=NOTHING)
    a, b = two_that_do_not_fit(rig, num_prompt=5)
    assert len(b.request.prompt) + len(b.tokens) == 12  # of which two blocks are full and cached
    rig.cancel(RequestId("a"))
    rig.run()
    assert_solo(b)
    assert rig.core.stats.recomputed_tokens == 12 - 8
    assert not a.ended


def test_a_copy_is_written_only_where_the_cache_has_nothing() -> None:
    rig = rig_of(7)
    _, b = two_that_do_not_fit(rig)
    before = len(rig.runner.batches)
    rig.cancel(RequestId("a"))
    rig.run()
    assert_solo(b)
    assert all(len(chunk.token_ids) == 1 for batch in rig.runner.batches[before:] for chunk in batch)
    assert rig.core.stats.recomputed_tokens == 0


def test_rows_that_come_back_are_those_of_their_positions() -> None:
    """Half of the blocks are shared, the others written; a later prompt reads the rows of both."""
    rig = rig_of(6)
    a, b = two_that_do_not_fit(rig, num_prompt=5)
    rig.cancel(a.request.request_id)
    rig.run()
    before = rig.core.stats.prefix_cache_hits
    later = rig.submit(make_request("later", [*b.request.prompt, *(t.token_id for t in b.tokens)], greedy(1)))
    rig.run()
    assert rig.core.stats.prefix_cache_hits - before == 16
    assert_solo(b, later)


def test_a_block_to_grow_into_is_blank() -> None:
    """Attention masks what is not written yet by weight zero, and zero times NaN is NaN."""
    rig = rig_of(8, prefix_caching=False)
    rig.submit(make_request("a", prompt_of(4), greedy(9)))
    rig.step()
    rig.step()
    blocks = rig.runner.batches[-1][0].blocks
    assert len(blocks) == 2
    assert rig.store.read_kv(slots_of(blocks, 4, 5, 4)).all()
    assert not rig.store.read_kv(slots_of(blocks, 5, 8, 4)).any()


# --- ends


@pytest.mark.parametrize("silently", [False, True])
@pytest.mark.parametrize("swap", [NOTHING, PLENTY])
def test_a_preempted_request_ends_and_leaves_nothing(swap: int, silently: bool) -> None:
    rig = rig_of(7, swap=swap)
    a, b = two_that_do_not_fit(rig)
    assert (rig.core.load().swap_bytes_used > 0) == (swap > 0)
    told = len(b.tokens)
    if silently:
        rig.cancel(RequestId("b"))
    else:
        rig.core.abort(RequestId("b"))
        rig.deliver()
        assert b.finish == Finish(FinishReason.ABORT)
    assert sum(len(rows) for rows in b.rows) == 6 + told - 1
    assert rig.core.load().swap_bytes_used == 0
    rig.run()
    assert_solo(a)
    rig.assert_baseline()


def recomputing(rig: FakeRig) -> Transcript:
    """One request whose positions are being computed again; the budget is 2 tokens per step."""
    a, b = two_that_do_not_fit(rig)
    rig.cancel(a.request.request_id)
    rig.step()
    assert rig.core.load().preempted == 0
    assert rig.core.stats.recomputed_tokens == 2
    return b


def slow_rig() -> FakeRig:
    bounds = limits(max_num_batched_tokens=2, swap_space_bytes=NOTHING)
    return FakeRig(num_blocks=7, bounds=bounds, prefix_caching=False)


def test_an_abort_while_recomputing_leaves_nothing() -> None:
    rig = slow_rig()
    b = recomputing(rig)
    rig.core.abort(RequestId("b"))
    rig.deliver()
    assert b.finish == Finish(FinishReason.ABORT)
    rig.assert_baseline()


def test_a_step_that_fails_while_recomputing_fails_the_request() -> None:
    rig = slow_rig()
    b = recomputing(rig)
    rig.runner.fails_on = lambda chunks: True
    rig.run()
    assert isinstance(b.error, InternalError)
    rig.assert_baseline()


def test_what_cannot_be_saved_fails_alone() -> None:
    rig, store = watched_rig(9)
    a = rig.submit(make_request("a", prompt_of(6, 0), greedy(14)))
    b = rig.submit(make_request("b", prompt_of(6, 1), SamplingParams(14, n=2, temperature=1.5, ignore_eos=True)))
    rig.step()
    store.fails = True
    rig.run()
    assert rig.core.stats.preemptions == 1
    assert isinstance(b.error, InternalError)
    assert_solo(a)
    rig.assert_baseline()


# --- weights


def freeze(rig: FakeRig) -> int:
    """What the engine does before it stops; the number of steps that it took."""
    rig.core.close_admission()
    steps = 0
    while rig.core.has_open_prompts():
        assert rig.step()
        steps += 1
    return steps


def test_a_freeze_waits_for_what_has_to_be_computed_again() -> None:
    rig = rig_of(7, swap=NOTHING)
    a, b = two_that_do_not_fit(rig)
    told = len(b.tokens)
    waits = rig.submit(make_request("waits", prompt_of(3), greedy(2)))
    assert freeze(rig) > 0
    assert a.ended  # it had the blocks
    assert len(b.tokens) == told + 1
    assert not waits.tokens
    rig.core.weight_version, rig.runner.weights = "1", 1
    rig.core.open_admission()
    rig.run()
    assert rig.core.stats.preemptions_recomputed == 1
    b.assert_equals(straddling_solo(b.request, [token.weight_version for token in b.tokens]))
    assert {token.weight_version for token in b.tokens} == {"", "1"}


def test_a_freeze_does_not_wait_for_what_is_saved() -> None:
    rig = rig_of(7)
    a, b = two_that_do_not_fit(rig)
    assert freeze(rig) == 0
    rig.core.weight_version, rig.runner.weights = "1", 1
    rig.core.open_admission()
    rig.run()
    for got in (a, b):
        got.assert_equals(straddling_solo(got.request, [token.weight_version for token in got.tokens]))


def test_kv_of_earlier_weights_is_saved_beyond_the_bound() -> None:
    rig = rig_of(7, swap=NOTHING)
    requests = [make_request(name, prompt_of(6, i), greedy(14)) for i, name in enumerate("ab")]
    a, b = (rig.submit(request) for request in requests)
    rig.step()
    assert freeze(rig) == 0
    rig.core.weight_version, rig.runner.weights = "1", 1
    rig.core.open_admission()
    run_until_preempted(rig)
    assert rig.core.load().swap_bytes_used > 0
    rig.run()
    assert (rig.core.stats.preemptions_swapped, rig.core.stats.preemptions_recomputed) == (1, 0)
    for got in (a, b):
        got.assert_equals(straddling_solo(got.request, [token.weight_version for token in got.tokens]))


@pytest.mark.parametrize("when", ["before", "after"])
def test_forgetting_prefixes_changes_no_weights(when: str) -> None:
    """It may still be computed again, but finds nothing in the cache."""
    rig = rig_of(7, swap=NOTHING)
    a = rig.submit(make_request("a", prompt_of(6, 0), greedy(14)))
    b = rig.submit(make_request("b", prompt_of(6, 1), greedy(14)))
    rig.step()
    if when == "before":
        rig.core.reset_prefix_cache()
    run_until_preempted(rig)
    if when == "after":
        rig.core.reset_prefix_cache()
    known = len(b.request.prompt) + len(b.tokens)
    rig.run()
    assert rig.core.stats.preemptions_recomputed == 1
    assert rig.core.stats.recomputed_tokens == known
    assert_solo(a, b)


def test_weights_do_not_change_under_what_has_to_be_computed_again() -> None:
    rig = rig_of(7, swap=NOTHING)
    two_that_do_not_fit(rig)
    with pytest.raises(AssertionError, match="other weights"):
        rig.core.weight_version = "1"


# --- short prompts of a decode engine


def local_request(name: str, num_prompt: int, *, limit: int, n: int = 1) -> EngineRequest:
    sampling = SamplingParams(6, n=n, temperature=1.5, ignore_eos=True, prompt_logprobs=None)
    request = make_request(name, prompt_of(num_prompt), sampling, work=Work.DECODE)
    return replace(request, local_prefill_max_tokens=limit)


@pytest.mark.parametrize(
    ("num_prompt", "limit", "is_local"), [(7, 7, True), (7, 6, False), (1, 0, False), (1, 1, True)]
)
def test_a_short_prompt_is_computed_on_decode(num_prompt: int, limit: int, is_local: bool) -> None:
    rig = rig_of(16)
    got = rig.submit(local_request("a", num_prompt, limit=limit, n=2))
    rig.run()
    assert (got.is_local, got.blocks is None) == (is_local, is_local)
    if is_local:
        assert_solo(got)
        assert rig.core.stats.prompt_tokens_computed == num_prompt
    else:
        rig.cancel(RequestId("a"))
    rig.assert_baseline()


def test_only_what_is_not_cached_counts_as_missing() -> None:
    rig = rig_of(16)
    rig.submit(make_request("warm", prompt_of(9), greedy(1)))
    rig.run()
    got = rig.submit(local_request("a", 11, limit=3))
    rig.run()
    assert got.is_local
    assert got.num_cached == 8
    assert_solo(got)


def test_a_handoff_for_a_prompt_that_is_computed_here_is_misplaced() -> None:
    for command in ("advance", "commit"):
        bounds = limits(max_num_batched_tokens=2)
        rig = FakeRig(bounds=bounds)
        got = rig.submit(local_request("a", 7, limit=7))
        rig.step()
        if command == "advance":
            rig.core.advance_handoff(RequestId("a"), 4)
        else:
            rig.core.commit_handoff(RequestId("a"), [])
        rig.deliver()
        assert isinstance(got.error, InternalError)
        assert "prefilling with 2 of 7" in got.error.message
        rig.assert_baseline()
