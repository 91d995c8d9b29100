"""Several choices of one prompt: computed once, forked, and each of them its own solo run."""

from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch

from common.engine.grammar import AllowedMask, GrammarMatcher
from common.engine.request import EngineRequest, RequestId, Work
from common.engine.saved import prompt_tail, save
from common.errors import HandoffCorruptError, InternalError, InvalidRequestError
from common.kv.pool import BlockId
from common.kv.store import slots_of
from common.sampling import Finish, FinishReason, SampledToken, SamplingParams
from tests.fakes.fake_runner import VOCAB_SIZE, fake_store
from tests.unit.engine.rig import FakeRig, RigPair, Transcript, limits, make_request, solo

PROMPT = [5, 6, 7, 8, 9, 10, 11]
ABORTED = Finish(FinishReason.ABORT)
ID = RequestId("a")


def sampled(n: int, max_tokens: int = 6, **more: object) -> SamplingParams:
    """Free sampling, so that the choices differ."""
    return SamplingParams(max_tokens, n=n, temperature=1.5, ignore_eos=True, **more)  # type: ignore[arg-type]


def assert_solo(got: Transcript) -> None:
    for choice in got.all:
        choice.assert_equals(solo(got.request, choice.choice))


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("start", [0, 1, None])
def test_every_choice_is_its_solo_run_and_the_prompt_is_computed_once(num_prompt: int, start: int | None) -> None:
    rig = FakeRig(bounds=limits(max_num_batched_tokens=6))
    got = rig.submit(make_request("a", (PROMPT + PROMPT)[:num_prompt], sampled(4), start=start))
    rig.run()
    assert_solo(got)
    assert len({tuple(t.token_id for t in choice.tokens) for choice in got.all}) == 4
    assert rig.core.stats.prompt_tokens_computed == num_prompt
    assert rig.core.stats.generated_tokens == 4 * 6
    rig.assert_baseline()


def test_choices_share_the_full_blocks_of_the_prompt() -> None:
    rig = FakeRig()
    rig.submit(make_request("a", PROMPT, sampled(3, 6)))
    rig.step()
    rig.step()
    # Eight tokens are two blocks of four, and one is given ahead; the first one is full of prompt and held once.
    assert rig.core.load().kv_blocks_used == 1 + 3 * 2
    assert rig.core.load().running == 3
    rig.run()
    rig.assert_baseline()


@pytest.mark.parametrize("num_prompt", [6, 7, 8, 9])
@pytest.mark.parametrize("spare", [0, 1, 2])
def test_choices_that_do_not_fit_are_served_one_after_another(num_prompt: int, spare: int) -> None:
    """Also when the pool holds one choice and nothing more: what waits keeps nothing that those that run need."""
    request = make_request("a", (PROMPT + PROMPT)[:num_prompt], sampled(5))
    rig = FakeRig(num_blocks=-(-request.num_slots // 4) + spare)
    got, late = rig.submit(request), rig.submit(make_request("late", PROMPT[:2], sampled(2)))
    rig.run()
    assert_solo(got)
    assert_solo(late)
    assert rig.core.stats.prompt_tokens_computed == num_prompt + 2
    rig.assert_baseline()


@pytest.mark.parametrize("seats", [1, 2, 3])
def test_more_choices_than_seats(seats: int) -> None:
    rig = FakeRig(bounds=limits(max_num_seqs=seats))
    got = rig.submit(make_request("a", PROMPT, sampled(7)))
    rig.run()
    assert_solo(got)
    assert max(len(batch) for batch in rig.runner.batches) == seats
    rig.assert_baseline()


def test_first_tokens_are_told_at_once_whoever_must_wait() -> None:
    rig = FakeRig(bounds=limits(max_num_seqs=1))
    got = rig.submit(make_request("a", PROMPT, sampled(3)))
    rig.step()
    assert [len(choice.tokens) for choice in got.all] == [1, 1, 1]
    assert [sum(len(rows) for rows in choice.rows) for choice in got.all] == [len(PROMPT)] * 3
    load = rig.core.load()
    assert (load.running, load.waiting) == (1, 2)


def test_forked_choices_wait_in_their_requests_place() -> None:
    rig = FakeRig(bounds=limits(max_num_seqs=1))
    first = rig.submit(make_request("a", PROMPT, sampled(2)))
    rig.step()
    later = rig.submit(make_request("later", PROMPT, sampled(1)))
    urgent = rig.submit(EngineRequest(RequestId("urgent"), PROMPT, sampled(1), 0, Work.WHOLE, priority=-9))
    while not urgent.tokens:
        rig.step()
    assert [choice.ended for choice in first.all] == [True, False]
    while not later.tokens:
        rig.step()
    assert [choice.ended for choice in first.all] == [True, True]


def test_a_first_token_ends_the_choices_that_draw_it() -> None:
    free = [solo(make_request("a", PROMPT, sampled(6)), choice).tokens[0].token_id for choice in range(6)]
    stops = frozenset({free[0], free[3]})
    rig = FakeRig()
    got = rig.submit(make_request("a", PROMPT, sampled(6, stop_token_ids=stops)))
    rig.step()
    ended = [choice.finish for choice in got.all]
    assert ended == [Finish(FinishReason.STOP, token) if token in stops else None for token in free]
    rig.run()
    assert_solo(got)
    rig.assert_baseline()


def test_one_token_each_forks_nothing() -> None:
    rig = FakeRig(num_blocks=2)
    got = rig.submit(make_request("a", PROMPT, sampled(5, 1)))
    rig.run()
    assert_solo(got)
    assert rig.core.stats.steps == 1
    rig.assert_baseline()


# --- prompt logprobs


@pytest.mark.parametrize("start", [0, None])
def test_prompt_logprobs_come_with_the_prompts_chunks(start: int | None) -> None:
    """After positions [0, e) those of [0, e] are known, the first of which has none."""
    rig = FakeRig(bounds=limits(max_num_batched_tokens=3))
    got = rig.submit(make_request("a", PROMPT, sampled(2, prompt_logprobs=2), start=start))
    rig.step()
    assert [len(part) for part in got.logprobs] == [4]
    rig.run()
    assert [len(part) for part in got.logprobs] == [4, 3]
    assert_solo(got)
    assert got.prompt_logprobs is not None
    assert got.prompt_logprobs["token_id"][1:, 0].tolist() == PROMPT[1:]


def test_a_prompt_of_one_token_has_one_entry_of_zeros() -> None:
    rig = FakeRig()
    got = rig.submit(make_request("a", PROMPT[:1], sampled(1, prompt_logprobs=1)))
    rig.run()
    assert got.prompt_logprobs is not None
    assert got.prompt_logprobs.tobytes() == bytes(24)


@pytest.mark.parametrize("after_steps", [0, 1])
def test_prompt_logprobs_outlive_an_aborted_first_choice(after_steps: int) -> None:
    """They belong to the prompt: the first choice that is left brings them."""
    rig = FakeRig(bounds=limits(max_num_batched_tokens=3))
    request = make_request("a", PROMPT, sampled(3, prompt_logprobs=1))
    got = rig.submit(request)
    for _ in range(after_steps):
        rig.step()
    rig.core.abort(ID, 0)
    rig.run()
    assert got.prompt_logprobs is not None
    expected = solo(request).prompt_logprobs
    assert expected is not None
    assert got.prompt_logprobs.tobytes() == expected.tobytes()
    rig.assert_baseline()


# --- across a handoff


@pytest.mark.parametrize(("num_blocks", "seats"), [(64, 8), (4, 8), (64, 1)])
@pytest.mark.parametrize("start", [0, 4, None])
def test_a_handoff_of_choices_equals_solo_runs(num_blocks: int, seats: int, start: int | None) -> None:
    prefill = FakeRig(bounds=limits(max_num_batched_tokens=3))
    decode = FakeRig(num_blocks=num_blocks, bounds=limits(max_num_seqs=seats))
    pair, request = RigPair(prefill, decode), make_request("a", PROMPT, sampled(4, prompt_logprobs=1), start=start)
    got = pair.start(request)
    pair.hand_over(ID)
    decode.run()
    assert_solo(got)
    told, expected = prefill.transcripts[ID].prompt_logprobs, solo(request).prompt_logprobs
    assert told is not None
    assert expected is not None
    assert told.tobytes() == expected.tobytes()
    assert (prefill.core.stats.prompt_tokens_computed, decode.core.stats.prompt_tokens_computed) == (len(PROMPT), 0)
    prefill.assert_baseline()
    decode.assert_baseline()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_handoff_with_another_number_of_first_tokens_is_corrupt(count: int) -> None:
    rig = FakeRig()
    got = rig.submit(make_request("a", PROMPT, sampled(2), work=Work.DECODE, start=None))
    rig.step()
    rig.core.commit_handoff(ID, [SampledToken(5)] * count)
    rig.deliver()
    assert isinstance(got.error, HandoffCorruptError)
    assert f"{count} first tokens came for 2 choices" in got.error.message
    rig.assert_baseline()


def test_no_first_token_of_a_handoff_lies_outside_the_vocabulary() -> None:
    rig = FakeRig()
    got = rig.submit(make_request("a", PROMPT, sampled(2), work=Work.DECODE, start=None))
    rig.step()
    rig.core.commit_handoff(ID, [SampledToken(5), SampledToken(VOCAB_SIZE)])
    rig.deliver()
    assert isinstance(got.error, HandoffCorruptError)


# --- aborts


def test_a_choice_that_is_aborted_early_is_never_forked() -> None:
    rig = FakeRig(bounds=limits(max_num_batched_tokens=3))
    got = rig.submit(make_request("a", PROMPT, sampled(3)))
    rig.step()
    rig.core.abort(ID, 1)
    rig.core.abort(ID, 1)
    rig.deliver()
    assert got.all[1].finish == ABORTED
    rig.run()
    for choice in (0, 2):
        got.all[choice].assert_equals(solo(got.request, choice))
    assert got.all[1].tokens == []
    rig.assert_baseline()


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_the_prompt_goes_on_without_choice_0(steps: int) -> None:
    rig = FakeRig(bounds=limits(max_num_batched_tokens=3))
    got = rig.submit(make_request("a", PROMPT, sampled(3)))
    for _ in range(steps):
        rig.step()
    rig.core.abort(ID, 0)
    rig.deliver()
    rig.run()
    assert (got.finish, got.tokens) == (ABORTED, [])
    for choice in (1, 2):
        got.all[choice].assert_equals(solo(got.request, choice))
    assert rig.core.stats.prompt_tokens_computed == len(PROMPT)
    rig.assert_baseline()


def test_a_forked_and_a_decoding_choice_are_aborted_alone() -> None:
    rig = FakeRig(bounds=limits(max_num_seqs=2))
    got = rig.submit(make_request("a", PROMPT, sampled(4)))
    rig.step()
    rig.step()
    rig.core.abort(ID, 1)  # decodes
    rig.core.abort(ID, 3)  # waits
    rig.deliver()
    assert rig.core.check_invariants() == []
    rig.run()
    for choice in (0, 2):
        got.all[choice].assert_equals(solo(got.request, choice))
    assert [len(got.all[choice].tokens) for choice in (1, 3)] == [2, 1]
    assert sum(len(rows) for rows in got.all[1].rows) == len(PROMPT) + 1
    rig.assert_baseline()


@pytest.mark.parametrize("steps", [0, 1, 3, 4])
def test_an_abort_of_the_request_ends_every_choice(steps: int) -> None:
    rig = FakeRig(bounds=limits(max_num_batched_tokens=3, max_num_seqs=2))
    got = rig.submit(make_request("a", PROMPT, sampled(4)))
    for _ in range(steps):
        rig.step()
    rig.core.abort(ID)
    rig.deliver()
    assert [choice.finish for choice in got.all] == [ABORTED] * 4
    rig.assert_baseline()


def test_aborting_each_choice_ends_the_request() -> None:
    rig = FakeRig()
    got = rig.submit(make_request("a", PROMPT, sampled(3)))
    for choice in range(3):
        rig.core.abort(ID, choice)
    rig.deliver()
    assert got.request_ended
    rig.assert_baseline()


@pytest.mark.parametrize("steps", [1, 3, 4])
def test_a_cancel_drops_every_choice(steps: int) -> None:
    rig = FakeRig(bounds=limits(max_num_batched_tokens=3, max_num_seqs=2))
    rig.submit(make_request("a", PROMPT, sampled(4)))
    for _ in range(steps):
        rig.step()
    rig.cancel(ID)
    rig.run()
    rig.assert_baseline()


# --- faults


def test_an_error_in_one_choice_fails_the_request_once() -> None:
    rig = FakeRig()
    bad_tokens = solo(make_request("a", PROMPT, sampled(3)), 1).tokens
    rig.runner.nan_after = lambda chunk: list(chunk.token_ids) == [bad_tokens[1].token_id] and chunk.start == 8
    got = rig.submit(make_request("a", PROMPT, sampled(3)))
    other = rig.submit(make_request("other", PROMPT[:3], sampled(2)))
    rig.run()
    assert isinstance(got.error, InternalError)
    assert_solo(other)
    rig.assert_baseline()


class Recital:
    """A grammar in which the ids follow one another in one order only."""

    def __init__(self, token_ids: list[int], position: int = 0) -> None:
        self.token_ids = token_ids
        self.position = position

    def fork(self) -> "Recital":
        return Recital(self.token_ids, self.position)

    def allowed(self) -> AllowedMask:
        mask_V: AllowedMask = np.arange(VOCAB_SIZE) == self.token_ids[self.position]
        return mask_V

    def accept(self, token_id: int) -> None:
        if token_id != self.token_ids[self.position]:
            raise InvalidRequestError("no")
        self.position += 1


RECITED = [7, 9, 8, 30, 31, 32]


def recital(name: str, work: Work) -> EngineRequest:
    matcher = cast(GrammarMatcher, Recital(RECITED))
    return EngineRequest(RequestId(name), PROMPT, sampled(3, grammar="recital"), 0, work, matcher=matcher)


@pytest.mark.parametrize("seats", [1, 8])
def test_every_choice_walks_through_the_grammar_on_its_own(seats: int) -> None:
    rig = FakeRig(bounds=limits(max_num_seqs=seats))
    here = rig.submit(recital("here", Work.WHOLE))
    rig.run()
    assert [[t.token_id for t in choice.tokens] for choice in here.all] == [RECITED] * 3
    pair, request = RigPair(FakeRig(), FakeRig(bounds=limits(max_num_seqs=seats))), recital("there", Work.WHOLE)
    there = pair.start(request)
    pair.hand_over(request.request_id)
    pair.decode.run()
    assert [[t.token_id for t in choice.tokens] for choice in there.all] == [RECITED] * 3


def test_a_first_token_that_the_grammar_refuses_is_corrupt() -> None:
    rig = FakeRig()
    got = rig.submit(replace(recital("a", Work.DECODE), routing_start=None))
    rig.step()
    rig.core.commit_handoff(ID, [SampledToken(7), SampledToken(8), SampledToken(7)])
    rig.deliver()
    assert isinstance(got.error, HandoffCorruptError)
    rig.assert_baseline()


@pytest.mark.parametrize("routing", [True, False])
def test_the_prompts_tail_is_copied_with_its_rows(routing: bool) -> None:
    """Positions 4 to 6 of a prompt of 7, from block 3 to block 5: slots 12 to 14 to slots 20 to 22."""
    store = fake_store(8)
    store.kv_LCSGD.copy_(torch.arange(store.kv_LCSGD.numel()).view(store.kv_LCSGD.shape))
    rows_NLK = np.arange(3 * 4, dtype=np.uint8).reshape(3, 2, 2)
    if routing:
        store.write_rows(np.array([12, 13, 14]), rows_NLK)
    before = store.kv_LCSGD.clone()
    [tail] = prompt_tail(store, [BlockId(1), BlockId(3)], 7, routing=routing)
    tail.write(store, [BlockId(1), BlockId(5)])
    before[:, :, 20:23] = before[:, :, 12:15]
    assert torch.equal(store.kv_LCSGD, before)
    if routing:
        np.testing.assert_array_equal(store.read_rows(np.array([20, 21, 22])), rows_NLK)
    assert prompt_tail(store, [BlockId(1), BlockId(3)], 8, routing=False) == ()


def test_a_long_sequence_is_copied_in_pieces() -> None:
    store, blocks = fake_store(600), [BlockId(b) for b in range(1, 600)]
    store.clear_blocks(blocks)
    slots = slots_of(blocks, 0, 2200, 4)
    store.write_kv(slots, torch.arange(2 * 2 * 2200, dtype=torch.float32).view(2, 2, 2200, 1, 1))
    pieces = save(store, blocks, 2200, routing=False)
    assert [(piece.start, piece.end) for piece in pieces] == [(0, 1024), (1024, 2048), (2048, 2200)]
    assert sum(piece.num_bytes for piece in pieces) == 2200 * 16
    before = store.read_kv(slots)
    store.clear_blocks(blocks[1:])
    for piece in pieces:
        piece.write(store, blocks, 4)
    assert torch.equal(store.read_kv(slots), before)


def test_tokens_name_the_weights_in_use() -> None:
    rig = FakeRig()
    rig.core.weight_version = "one"
    got = rig.submit(make_request("a", PROMPT, sampled(2, 3)))
    rig.step()
    rig.core.weight_version = "two"
    rig.run()
    for choice in got.all:
        assert [t.weight_version for t in choice.tokens] == ["one", "two", "two"]
    assert rig.core.known_weight_versions >= {"one", "two"}
