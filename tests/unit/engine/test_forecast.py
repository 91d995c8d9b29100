"""What is told about the next step is what the next step computes, unless something happens in between."""

from collections.abc import Sequence

import pytest

from common.engine.request import Work
from common.model.batch import Chunk
from common.sampling import SamplingParams
from tests.unit.engine.rig import FakeRig, greedy, limits, make_request

PROMPT = [3, 7, 1, 9, 4, 11]


def _shape(chunks: Sequence[Chunk]) -> list[tuple[int, int, tuple[int, ...], bool, bool]]:
    """Everything but the ids, and blocks that are not used yet."""
    return [(c.start, c.end, tuple(c.blocks[: -(-c.end // 4)]), c.wants_logits, c.wants_rows) for c in chunks]


def _hits(rig: FakeRig) -> list[bool]:
    """For each step but the first: whether it was foretold."""
    runner = rig.runner
    told = runner.forecasts[:-1]
    return [_shape(forecast) == _shape(batch) for forecast, batch in zip(told, runner.batches[1:], strict=True)]


@pytest.mark.parametrize("budget", [3, 5, 64])
def test_every_step_of_prompts_and_decodes_is_foretold(budget: int) -> None:
    """Blocks of 4: sequences outgrow theirs many times on the way."""
    rig = FakeRig(bounds=limits(max_num_batched_tokens=budget))
    for name, num_prompt in (("a", 3), ("b", 17), ("c", 9)):
        rig.submit(make_request(name, list(range(3, 3 + num_prompt)), greedy(20)))
    rig.run()
    assert len(rig.runner.batches) >= 20
    assert all(_hits(rig))


def test_the_end_of_a_request_by_length_is_foretold() -> None:
    rig = FakeRig()
    rig.submit(make_request("a", PROMPT, greedy(3)))
    rig.submit(make_request("b", PROMPT, greedy(9)))
    rig.run()
    assert all(_hits(rig))
    assert rig.runner.forecasts[-1] == ()


def test_a_prefill_is_foretold_to_end_with_its_prompt() -> None:
    rig = FakeRig(bounds=limits(max_num_batched_tokens=4))
    rig.submit(make_request("p", list(range(3, 14)), greedy(5), work=Work.PREFILL))
    rig.step()
    rig.step()
    assert _hits(rig) == [True]
    rig.step()
    assert rig.runner.forecasts[-1] == ()


def test_a_prompt_that_fills_its_blocks_goes_on_in_one_that_it_has_not_yet() -> None:
    rig = FakeRig()
    rig.submit(make_request("a", list(range(3, 11)), greedy(6)))
    rig.run()
    assert rig.runner.forecasts[0] == ()
    assert all(_hits(rig)[1:])


def test_nothing_is_told_before_other_choices_come_in() -> None:
    rig = FakeRig()
    rig.submit(make_request("a", PROMPT, SamplingParams(max_tokens=6, n=2, ignore_eos=True)))
    rig.run()
    assert rig.runner.forecasts[0] == ()
    assert all(_hits(rig)[1:])


def test_a_request_that_comes_in_or_stops_early_is_not_foretold_and_does_no_harm() -> None:
    rig = FakeRig()
    first = rig.submit(make_request("a", PROMPT, greedy(12)))
    rig.step()
    rig.step()
    rig.submit(make_request("b", PROMPT, greedy(4)))
    rig.step()
    assert _hits(rig) == [True, False]
    rig.core.abort(first.request.request_id)
    rig.step()
    assert _hits(rig) == [True, False, False]
