"""The engine core against the solo oracle: tokens, rows, ends, and nothing left behind."""

from collections.abc import Sequence

import numpy as np
import pytest

from common.engine.request import RequestId, Work
from common.errors import HandoffCorruptError, InternalError, InvalidRequestError, RoutingMissingError
from common.kv.store import slots_of
from common.model.batch import Chunk
from common.sampling import Finish, FinishReason, SampledToken, SamplingParams
from tests.fakes.fake_runner import VOCAB_SIZE
from tests.unit.engine.rig import FakeRig, RigPair, greedy, limits, make_request, solo

PROMPT = [5, 6, 7, 8, 9, 10, 11]
ABORTED = Finish(FinishReason.ABORT)


def prompt_of(length: int) -> list[int]:
    return [3 + (7 * i) % 40 for i in range(length)]


@pytest.mark.parametrize("max_tokens", [1, 2, 16])
@pytest.mark.parametrize("num_prompt", [1, 2, 15, 16, 17, 33])
def test_every_length_has_exact_tokens_and_rows(num_prompt: int, max_tokens: int) -> None:
    rig = FakeRig(block_size=16, bounds=limits(max_num_batched_tokens=10))
    request = make_request("a", prompt_of(num_prompt), greedy(max_tokens))
    got = rig.submit(request)
    rig.run()
    got.assert_equals(solo(request))
    assert got.rows_TLK is not None
    assert got.rows_TLK.shape == (num_prompt + max_tokens - 1, 2, 2)
    assert got.rows_TLK.dtype == np.uint8
    rig.assert_baseline()


@pytest.mark.parametrize("start", [0, 1, 6, 7])
def test_rows_begin_at_the_requested_position(start: int) -> None:
    rig = FakeRig(bounds=limits(max_num_batched_tokens=3))
    request = make_request("a", PROMPT, greedy(5), start=start)
    whole = solo(make_request("whole", PROMPT, greedy(5))).rows_TLK
    got = rig.submit(request)
    rig.run()
    got.assert_equals(solo(request))
    assert whole is not None
    np.testing.assert_array_equal(got.rows_TLK, whole[start:])


def test_routing_off_captures_and_sends_no_rows() -> None:
    rig = FakeRig()
    request = make_request("a", PROMPT, greedy(5), start=None)
    got = rig.submit(request)
    rig.run()
    got.assert_equals(solo(request))
    assert not any(chunk.wants_rows for batch in rig.runner.batches for chunk in batch)
    assert rig.core.stats.routing_rows_captured == 0


def test_prompt_rows_leave_while_the_prompt_is_computed() -> None:
    rig = FakeRig(bounds=limits(max_num_batched_tokens=3))
    got = rig.submit(make_request("a", PROMPT, greedy(1)))
    rig.step()
    assert [len(r) for r in got.rows] == [3]
    assert got.tokens == []
    rig.run()
    assert [len(r) for r in got.rows] == [3, 3, 1]


def test_stats_count_what_was_computed() -> None:
    rig = FakeRig(bounds=limits(max_num_batched_tokens=4))
    rig.submit(make_request("a", PROMPT, greedy(5)))
    rig.run()
    stats = rig.core.stats
    assert (stats.prompt_tokens_computed, stats.generated_tokens) == (7, 5)
    assert (stats.steps, stats.decode_steps) == (2 + 4, 4)
    assert stats.routing_rows_captured == 7 + 4


def test_an_eos_and_a_stop_id_end_a_request_with_their_reason() -> None:
    free = solo(make_request("a", PROMPT, greedy(10)))
    third = free.tokens[2].token_id
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, stop_token_ids=frozenset({third}))
    rig = FakeRig()
    got = rig.submit(make_request("stop", PROMPT, params))
    eos = rig.submit(make_request("eos", PROMPT, SamplingParams(10, temperature=0, logit_bias={2: 100.0})))
    rig.run()
    assert tuple(got.tokens) == free.tokens[:3]
    assert got.finish == Finish(FinishReason.STOP, third)
    assert [t.token_id for t in eos.tokens] == [2]
    assert eos.finish == Finish(FinishReason.STOP)
    assert rig.core.load().kv_blocks_used == 0


def test_min_tokens_keeps_eos_away_until_it_is_reached() -> None:
    params = SamplingParams(max_tokens=10, min_tokens=3, temperature=0, logit_bias={2: 100.0})
    rig = FakeRig()
    got = rig.submit(make_request("a", PROMPT, params))
    rig.run()
    ids = [t.token_id for t in got.tokens]
    assert len(ids) == 4
    assert 2 not in ids[:3]
    assert ids[3] == 2


# --- prefill and decode on two engines


def fake_pair() -> RigPair:
    return RigPair(FakeRig(bounds=limits(max_num_batched_tokens=3)), FakeRig())


@pytest.mark.parametrize("start", [0, 4, 7, None])
@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_a_handoff_equals_a_solo_run(max_tokens: int, start: int | None) -> None:
    pair, request = fake_pair(), make_request("a", PROMPT, greedy(max_tokens), start=start)
    pair.start(request)
    pair.hand_over(request.request_id)
    pair.decode.run()
    pair.decode.transcripts[request.request_id].assert_equals(solo(request))
    assert pair.decode.core.stats.prompt_tokens_computed == 0
    assert pair.prefill.core.stats.decode_steps == 0
    pair.prefill.assert_baseline()
    pair.decode.assert_baseline()


def test_prefill_reports_each_chunk_and_keeps_its_blocks_until_released() -> None:
    rig = FakeRig(bounds=limits(max_num_batched_tokens=3))
    got = rig.submit(make_request("a", PROMPT, greedy(9), work=Work.PREFILL))
    rig.run()
    assert [(a.computed, bool(a.first_tokens)) for a in got.advances] == [(3, False), (6, False), (7, True)]
    assert rig.core.load().handoffs == 1
    assert rig.core.load().kv_blocks_used == 2
    rig.cancel(RequestId("a"))
    rig.assert_baseline()


def test_decode_streams_prompt_rows_before_the_first_token() -> None:
    pair, request = fake_pair(), make_request("a", PROMPT, greedy(4))
    pair.start(request)
    pair.hand_over(request.request_id)
    pair.decode.run()
    assert [len(r) for r in pair.decode.transcripts[request.request_id].rows] == [3, 3, 1, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("sampling", "finish"),
    [
        (greedy(1), Finish(FinishReason.LENGTH)),
        (SamplingParams(9, temperature=0, logit_bias={2: 100.0}), Finish(FinishReason.STOP)),
        (
            SamplingParams(9, temperature=0, logit_bias={8: 100.0}, stop_token_ids=frozenset({8})),
            Finish(FinishReason.STOP, 8),
        ),
    ],
)
def test_a_first_token_that_ends_the_request_costs_no_step(sampling: SamplingParams, finish: Finish) -> None:
    pair, request = fake_pair(), make_request("a", PROMPT, sampling)
    pair.start(request)
    pair.hand_over(request.request_id)
    got = pair.decode.transcripts[request.request_id]
    assert got.finish == finish
    assert (len(got.tokens), sum(len(r) for r in got.rows)) == (1, len(PROMPT))
    assert pair.decode.step() is False
    assert pair.decode.core.stats.steps == 0
    pair.decode.assert_baseline()


def test_a_handoff_without_rows_fails_only_its_request() -> None:
    pair, request = fake_pair(), make_request("a", PROMPT, greedy(4))
    other = make_request("b", PROMPT, greedy(4))
    pair.start(request)
    pair.decode.submit(other)
    pair.decode.core.commit_handoff(request.request_id, [SampledToken(5)])
    pair.decode.run()
    assert isinstance(pair.decode.transcripts[request.request_id].error, RoutingMissingError)
    pair.decode.transcripts[other.request_id].assert_equals(solo(other))


def test_handoff_calls_that_do_not_fit_fail_only_their_request() -> None:
    rig = FakeRig()
    beyond = rig.submit(make_request("beyond", PROMPT, greedy(4), work=Work.DECODE))
    wrong = rig.submit(make_request("wrong", PROMPT, greedy(4)))
    alien = rig.submit(make_request("alien", PROMPT, greedy(4), work=Work.DECODE))
    rig.core.step()
    rig.core.commit_handoff(RequestId("alien"), [SampledToken(VOCAB_SIZE)])
    rig.core.advance_handoff(RequestId("beyond"), len(PROMPT) + 1)
    rig.core.commit_handoff(RequestId("wrong"), [SampledToken(5)])
    rig.deliver()
    assert isinstance(beyond.error, InternalError)
    assert isinstance(wrong.error, InternalError)
    assert isinstance(alien.error, HandoffCorruptError)
    rig.assert_baseline()


def test_leased_blocks_are_blank() -> None:
    """Attention masks the unwritten tail of a block by weight zero, and zero times NaN is NaN."""
    rig = FakeRig(prefix_caching=False)
    used = rig.submit(make_request("used", PROMPT, greedy(4)))
    rig.run()
    assert used.ended
    leased = rig.submit(make_request("leased", PROMPT, greedy(4), work=Work.DECODE))
    rig.step()
    assert leased.blocks is not None
    slots = slots_of(leased.blocks, 0, 8, 4)
    assert not rig.store.read_kv(slots).any()


# --- ends


def test_an_ended_request_leaves_neither_rows_nor_kv_behind() -> None:
    rig = FakeRig(prefix_caching=False)
    rig.submit(make_request("a", PROMPT, greedy(4)))
    rig.step()
    slots = slots_of(rig.runner.batches[0][0].blocks, 0, len(PROMPT), 4)
    assert len(rig.store.read_rows(slots)) == len(PROMPT)
    rig.run()
    with pytest.raises(RoutingMissingError):
        rig.store.read_rows(slots[:1])
    assert rig.store.read_kv(slots).isnan().all()


def test_abort_while_waiting_leased_prefilling_and_decoding() -> None:
    rig = FakeRig(num_blocks=8, bounds=limits(max_num_batched_tokens=4))
    decoding = rig.submit(make_request("decoding", PROMPT[:2], greedy(4)))
    rig.step()
    leased = rig.submit(make_request("leased", PROMPT, greedy(2), work=Work.DECODE))
    prefilling = rig.submit(make_request("prefilling", PROMPT, greedy(2)))
    waiting = rig.submit(make_request("waiting", PROMPT, greedy(20)))
    rig.step()
    load = rig.core.load()
    assert (load.running, load.handoffs, load.waiting) == (2, 1, 1)
    for name in ("waiting", "leased", "prefilling", "decoding"):
        rig.core.abort(RequestId(name))
    rig.deliver()
    for transcript in (waiting, leased, prefilling, decoding):
        assert transcript.finish == ABORTED
    assert [len(t.tokens) for t in (waiting, leased, prefilling, decoding)] == [0, 0, 0, 2]
    assert sum(len(r) for r in decoding.rows) == 2 + 2 - 1
    rig.assert_baseline()


def test_abort_of_a_held_prefill_ends_it() -> None:
    rig = FakeRig()
    got = rig.submit(make_request("a", PROMPT, greedy(4), work=Work.PREFILL))
    rig.run()
    rig.core.abort(RequestId("a"))
    rig.deliver()
    assert got.finish == ABORTED
    rig.assert_baseline()


def test_cancel_is_silent_and_repeatable() -> None:
    rig = FakeRig()
    got = rig.submit(make_request("a", PROMPT, greedy(4)))
    rig.step()
    num_events = got.num_events
    for _ in range(2):
        rig.cancel(RequestId("a"))
    rig.core.cancel(RequestId("never seen"))
    rig.run()
    assert got.num_events == num_events
    rig.assert_baseline()


def test_an_ended_id_may_be_used_again() -> None:
    rig = FakeRig()
    request = make_request("a", PROMPT, greedy(4))
    for _ in range(2):
        got = rig.submit(request)
        rig.run()
        got.assert_equals(solo(request))


# --- faults


def test_a_lost_row_fails_its_request_and_no_other() -> None:
    rig = FakeRig()
    first_blocks = [0]
    rig.runner.lost_rows = lambda chunk, position: chunk.blocks[0] == first_blocks[0] and position == 8
    lost = rig.submit(make_request("lost", PROMPT, greedy(9)))
    good = rig.submit(make_request("good", PROMPT[:3], greedy(9)))
    rig.step()
    first_blocks[0] = max(rig.runner.batches[0], key=lambda chunk: len(chunk.token_ids)).blocks[0]
    rig.run()
    assert isinstance(lost.error, RoutingMissingError)
    assert [t.token_id for t in lost.tokens] == [t.token_id for t in solo(lost.request).tokens[:2]]
    good.assert_equals(solo(good.request))
    rig.assert_baseline()


def test_nan_logits_fail_their_sequence_only() -> None:
    rig = FakeRig()
    rig.runner.nan_after = lambda chunk: chunk.end == len(PROMPT) + 2
    bad = rig.submit(make_request("bad", PROMPT, greedy(9)))
    good = rig.submit(make_request("good", PROMPT[:3], greedy(4)))
    rig.run()
    assert isinstance(bad.error, InternalError)
    assert len(bad.tokens) == 2
    good.assert_equals(solo(good.request))
    rig.assert_baseline()


def test_a_step_that_raises_fails_its_batch_and_the_engine_goes_on() -> None:
    def has_long_prompt(chunks: Sequence[Chunk]) -> bool:
        return any(chunk.start == 0 and len(chunk.token_ids) == len(PROMPT) for chunk in chunks)

    rig = FakeRig(bounds=limits(max_num_seqs=2))
    rig.runner.fails_on = has_long_prompt
    first = rig.submit(make_request("first", PROMPT, greedy(4)))
    second = rig.submit(make_request("second", PROMPT[:2], greedy(4)))
    later = rig.submit(make_request("later", PROMPT[:3], greedy(4)))
    rig.run()
    assert isinstance(first.error, InternalError)
    assert isinstance(second.error, InternalError)
    later.assert_equals(solo(later.request))
    assert rig.core.stats.step_failures == 1
    rig.assert_baseline()


def test_parameters_that_leave_no_token_fail_in_words() -> None:
    rig = FakeRig()
    params = SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=frozenset(range(50)))
    got = rig.submit(make_request("a", PROMPT, params))
    rig.run()
    assert isinstance(got.error, InvalidRequestError)
    assert got.error.param == "min_tokens"
