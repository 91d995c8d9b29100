"""How long requests spend in each stage of an engine, by a clock that only the steps and the test move."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from common.engine.request import RequestId, Work
from common.model.batch import Chunk
from tests.fakes.heard_stages import HeardStages
from tests.unit.engine.rig import SlowRig, greedy, limits, make_request

STEP_S, TOKEN_S = 1.0, 0.01


def cost(chunks: Sequence[Chunk]) -> float:
    return STEP_S + TOKEN_S * sum(len(chunk.token_ids) for chunk in chunks)


def heard_by(rig: SlowRig) -> HeardStages:
    rig.core.observer = stages = HeardStages()
    return stages


def test_a_prompt_in_two_chunks_and_three_tokens() -> None:
    rig = SlowRig(cost, bounds=limits(max_num_batched_tokens=16))
    stages = heard_by(rig)
    rig.submit(make_request("r", [5] * 20, greedy(3)))
    rig.run()
    assert stages.waited == [0]
    assert stages.prefill == [pytest.approx(2 * STEP_S + 20 * TOKEN_S)]
    assert stages.decode == [pytest.approx(2 * (STEP_S + TOKEN_S))]
    assert stages.handoff == []


def test_the_wait_for_a_seat_is_no_part_of_the_prefill() -> None:
    rig = SlowRig(cost, bounds=limits(max_num_seqs=1))
    stages = heard_by(rig)
    rig.submit(make_request("first", [5] * 4, greedy(2)))
    rig.submit(make_request("second", [6] * 4, greedy(1)))
    rig.run()
    assert stages.waited == [0, pytest.approx(2 * STEP_S + 5 * TOKEN_S)]
    assert stages.prefill == [pytest.approx(STEP_S + 4 * TOKEN_S)] * 2


def test_every_choice_decodes_and_one_of_a_single_token_does_not() -> None:
    rig = SlowRig(cost)
    stages = heard_by(rig)
    rig.submit(make_request("two", [5] * 4, replace(greedy(2), n=2)))
    rig.run()
    rig.submit(make_request("one", [5] * 4, greedy(1)))
    rig.run()
    assert len(stages.prefill) == 2
    assert len(stages.decode) == 2


def test_a_prompt_that_is_computed_for_another_worker() -> None:
    rig = SlowRig(cost)
    stages = heard_by(rig)
    rig.submit(make_request("r", [5] * 4, greedy(3), work=Work.PREFILL))
    rig.run()
    assert stages.prefill == [pytest.approx(STEP_S + 4 * TOKEN_S)]
    assert stages.decode == stages.handoff == []
    rig.cancel(RequestId("r"))


def test_a_prompt_that_is_handed_over() -> None:
    source = SlowRig(cost)
    source_request = make_request("r", [5] * 4, greedy(2), start=None)
    token = source.submit(source_request)
    source.run()
    rig = SlowRig(cost)
    stages = heard_by(rig)
    rig.submit(replace(source_request, work=Work.DECODE))
    rig.step()
    rig.clock.now += 7.0
    rig.core.commit_handoff(RequestId("r"), token.tokens[:1])
    assert stages.handoff == [7.0]
    assert stages.prefill == []
    rig.cancel(RequestId("r"))


def test_every_step_is_counted_by_its_tokens() -> None:
    rig = SlowRig(cost, bounds=limits(max_num_batched_tokens=16))
    rig.submit(make_request("r", [5] * 20, greedy(3)))
    rig.run()
    counts = rig.core.stats.step_tokens
    assert counts.sum == 16 + 4 + 1 + 1
    assert counts.buckets[:3] == [("1.0", 2), ("8.0", 3), ("16.0", 4)]
    assert counts.buckets[-1] == ("+Inf", 4)
