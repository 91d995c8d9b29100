"""Short prompts that a decode engine computes itself."""

from dataclasses import replace

import pytest

from common.engine.request import EngineRequest, RequestId, Work
from common.errors import InternalError
from common.sampling import SamplingParams
from tests.unit.engine.crowded import (
    assert_solo,
    prompt_of,
    rig_of,
)
from tests.unit.engine.rig import (
    FakeRig,
    greedy,
    limits,
    make_request,
)


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
