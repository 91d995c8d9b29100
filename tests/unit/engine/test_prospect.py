"""Whose first token is bound to be late is refused at the door; everybody else is let in."""

from dataclasses import replace

import pytest

from common.engine.backlog import Backlog
from common.engine.prospect import Prospect, Waiting
from common.engine.request import EngineRequest, RequestId, Work
from common.errors import OverloadedError
from common.sampling import SamplingParams
from tests.unit.engine.rig import make_request


def prompt(num_tokens: int, *, priority: int = 0, work: Work = Work.WHOLE) -> EngineRequest:
    request = make_request("new", [5] * num_tokens, SamplingParams(max_tokens=2), work=work)
    return replace(request, request_id=RequestId("new"), priority=priority)


def waiting(num_tokens: int, *, since: float = 10.0, priority: int = 0) -> Waiting:
    return Waiting(since, priority, num_tokens)


def prospect(ttft_s: float | None = 1.0, *, open_tokens: int = 0, token_s: float | None = 0.001) -> Prospect:
    made = Prospect(ttft_s)
    made.backlog = Backlog(open_tokens, token_s)
    return made


def test_prompts_ahead_times_the_measured_rate() -> None:
    """200 tokens under way, 300 + 100 waiting, 401 of its own: 1.001 s at 1 ms each."""
    line = [waiting(300), waiting(100)]
    prospect(open_tokens=200).check(prompt(400), line, 10.0)
    with pytest.raises(OverloadedError) as caught:
        prospect(open_tokens=200).check(prompt(401), line, 10.0)
    assert caught.value.message == (
        "the first token is predicted after 1.00 s, later than the 1 s of --slo-ttft, with 2 requests waiting ahead; "
        "retry in 1 s"
    )


def test_when_to_retry_is_when_the_queue_will_have_gone_down() -> None:
    """5000 + 500 tokens are 5.5 s, 4.5 s too much."""
    with pytest.raises(OverloadedError) as caught:
        prospect().check(prompt(500), [waiting(5000)], 10.0)
    assert caught.value.retry_after_s == 5


def test_only_what_comes_first_counts() -> None:
    line = [waiting(5000, priority=1), waiting(5000, priority=2)]
    prospect().check(prompt(500), line, 10.0)
    prospect().check(prompt(500, priority=-1), [*line, waiting(5000)], 10.0)
    with pytest.raises(OverloadedError):
        prospect().check(prompt(500, priority=1), line, 10.0)


def test_nobody_is_refused_while_nobody_is_ahead() -> None:
    """A prompt that takes longer than the objective on an idle worker would otherwise be refused for ever."""
    prospect().check(prompt(5000), [], 10.0)


def test_the_first_in_line_tells_how_long_the_wait_is() -> None:
    """For seats and blocks nothing else is known; on a decode worker that waits for others' prompts neither."""
    request = prompt(5000, work=Work.DECODE)
    prospect(token_s=None).check(request, [waiting(0, since=9.0), waiting(0, since=9.9)], 10.0)
    with pytest.raises(OverloadedError, match=r"predicted after 1\.50 s"):
        prospect(token_s=None).check(request, [waiting(0, since=8.5), waiting(0, since=9.9)], 10.0)


def test_a_prompt_that_is_computed_elsewhere_takes_no_time_here() -> None:
    assert Waiting.of(prompt(500, work=Work.DECODE), 1.0) == Waiting(1.0, 0, 0)
    assert Waiting.of(prompt(500, work=Work.PREFILL, priority=3), 1.0) == Waiting(1.0, 3, 500)


@pytest.mark.parametrize("ttft_s", [None, 1.0])
def test_without_an_objective_or_a_measure_nobody_is_refused(ttft_s: float | None) -> None:
    unmeasured = prospect(ttft_s, token_s=None if ttft_s else 0.001)
    unmeasured.check(prompt(5000), [waiting(5000)], 10.0)
    assert unmeasured.enabled is (ttft_s is not None)


def test_what_the_prefix_cache_has_is_not_waited_for() -> None:
    """Prompts of which nine tenths are cached: after many of them, a tenth of those that wait counts."""
    warm = prospect()
    for _ in range(100):
        warm.seated(100, 90)
    assert warm.uncached_share == pytest.approx(0.1, abs=0.001)
    warm.check(prompt(1000), [waiting(8900)], 10.0)
    with pytest.raises(OverloadedError):
        warm.check(prompt(1000), [waiting(9100)], 10.0)
