"""Advice on workers: worked by hand where a formula is simple, simulated where it is an approximation."""

import heapq
import math
import random
from typing import Any

import pytest

from common.engine.step_times import StepTimes
from common.errors import ConfigError, UnavailableError
from deploy.advise.advice import (
    DecodeAdvice,
    PrefillAdvice,
    Split,
    Workload,
    best_split,
    decode_advice,
    needed,
    prefill_advice,
)
from deploy.advise.command import main, report
from deploy.advise.profile import ClusterProfile, WorkerProfile, read_profile
from deploy.client import Json

#: 10 ms per step and 1 ms per token of either kind; nothing depends on contexts or experts.
PLAIN = StepTimes(fixed_s=0.010, prompt_token_s=0.001, decode_token_s=0.001)


def worker(times: StepTimes = PLAIN, chunk_tokens: int = 100, max_num_seqs: int = 64) -> WorkerProfile:
    return WorkerProfile("w", times, chunk_tokens, max_num_seqs)


def test_a_prompt_takes_the_steps_of_its_chunks() -> None:
    """250 tokens in chunks of 100: three steps of 10 ms, and 250 ms for the tokens."""
    assert prefill_advice(worker(), Workload(250, 10, 1.0, 0.05)).prompt_s == pytest.approx(0.280)


def test_pairs_of_a_prompt_are_counted_over_its_chunks() -> None:
    """Position i attends to i + 1 keys: 1 + … + 5 = 15, however it is cut."""
    profile = worker(StepTimes(prompt_pair_s=0.01), chunk_tokens=2)
    assert prefill_advice(profile, Workload(5, 1, 1.0, 1.0)).prompt_s == pytest.approx(0.15)


def test_the_largest_batch_keeps_to_the_objective_and_to_the_seats() -> None:
    """10 ms + 1 ms per sequence: 40 fit into 50 ms."""
    assert decode_advice(worker(), Workload(100, 10, 1.0, 0.050)).batch == 40
    assert decode_advice(worker(max_num_seqs=8), Workload(100, 10, 1.0, 0.050)).batch == 8
    assert decode_advice(worker(), Workload(100, 10, 1.0, 0.0105)).batch == 0


def test_contexts_make_steps_longer() -> None:
    """A sequence attends to 100 + 20/2 keys on average: 1.1 ms beside the 1 ms of its token; 19 fit into 50 ms."""
    times = StepTimes(fixed_s=0.010, decode_token_s=0.001, decode_pair_s=0.00001)
    advice = decode_advice(worker(times), Workload(100, 20, 1.0, 0.050))
    assert advice.batch == 19
    assert advice.step_s(19) == pytest.approx(0.0499)


def test_sequences_that_decode_at_a_time() -> None:
    """11 tokens are 10 steps. 20 requests/s of 10 steps of (10 + n) ms: n = 0.2 (10 + n), so n = 2.5."""
    advice = decode_advice(worker(), Workload(100, 11, 1.0, 0.050))
    assert advice.num_seqs(20) == pytest.approx(2.5)
    # 0.9 (10 + n) = n at n = 90, which 40 seats cannot hold.
    assert advice.num_seqs(90) == math.inf
    assert advice.attainment(90) == 0


def test_a_single_token_needs_no_decode() -> None:
    advice = decode_advice(worker(), Workload(100, 1, 1.0, 0.050))
    assert advice.attainment(1000) == 1
    assert advice.max_rate == math.inf


@pytest.mark.parametrize(("load", "slack"), [(0.5, 1.0), (0.7, 2.0), (0.8, 4.0), (0.9, 8.0)])
def test_the_share_of_late_first_tokens_is_that_of_a_simulated_queue(load: float, slack: float) -> None:
    """Poisson arrivals at a server that takes 1 s for each; `slack` seconds of waiting are in time."""
    draw = random.Random(1)
    free_at = now = 0.0
    num_late, num = 0, 100_000
    for _ in range(num):
        now += draw.expovariate(load)
        num_late += free_at - now > slack
        free_at = max(free_at, now) + 1.0
    predicted = 1 - PrefillAdvice(1.0, 1.0 + slack).attainment(load)
    assert predicted == pytest.approx(num_late / num, abs=0.06)


def test_the_share_of_late_steps_is_that_of_simulated_seats() -> None:
    """Poisson arrivals at 50/s that stay for 10 steps of 20 ms: 10 at a time. In time while at most 13 are there."""
    draw = random.Random(1)
    now, ends, num_late, num = 0.0, list[float](), 0, 100_000
    for _ in range(num):
        now += draw.expovariate(50.0)
        while ends and ends[0] <= now:
            heapq.heappop(ends)
        num_late += len(ends) > 13
        heapq.heappush(ends, now + 0.2)
    advice = DecodeAdvice(worker(StepTimes(fixed_s=0.020)), batch=13, context=0, num_steps=10)
    assert advice.num_seqs(50) == pytest.approx(10)
    assert 1 - advice.attainment(50) == pytest.approx(num_late / num, abs=0.01)


def test_rates_are_the_largest_at_which_nine_in_ten_are_in_time() -> None:
    for advice in (PrefillAdvice(0.2, 1.0), decode_advice(worker(), Workload(100, 11, 1.0, 0.050))):
        assert advice.attainment(advice.max_rate) == pytest.approx(0.9, abs=1e-6)
        assert advice.attainment(1.01 * advice.max_rate) < 0.9


def test_an_objective_that_no_worker_can_keep_to() -> None:
    assert PrefillAdvice(2.0, 1.0).max_rate == 0
    assert decode_advice(worker(), Workload(100, 11, 1.0, 0.005)).max_rate == 0
    assert needed(10, 0) is None


@pytest.mark.parametrize(("rate", "number"), [(0.5, 1), (2.0, 1), (2.1, 2), (20.0, 10)])
def test_workers_that_a_rate_needs(rate: float, number: int) -> None:
    assert needed(rate, 2.0) == number


def test_the_best_split_serves_most() -> None:
    """Prefill 2 and decode 6 requests/s each: 3 + 1 serve 6, 2 + 2 only 4."""
    assert best_split(4, 2.0, 6.0) == Split(3, 1, 6.0)
    assert best_split(4, 6.0, 2.0) == Split(1, 3, 6.0)
    assert best_split(2, 1.0, 100.0) == Split(1, 1, 1.0)
    assert best_split(4, 5.0, math.inf) == Split(3, 1, 15.0)


def cluster(*workers: Json) -> Json:
    return {"workers": list(workers)}


def described(role: str, **steps: Any) -> Json:
    times = dict.fromkeys(StepTimes._fields, 0.0) | PLAIN._asdict()
    step_times = times | {"prompt_steps": 0, "decode_steps": 0, "error": 0.0} | steps
    return {
        "id": role,
        "role": role,
        "max_num_batched_tokens": 100,
        "max_num_seqs": 64,
        "step_times": step_times,
    }


def test_the_profile_is_read_from_the_cluster() -> None:
    silent = {"id": "x", "role": "prefill", "max_num_batched_tokens": None, "max_num_seqs": None, "step_times": None}
    profile = read_profile(cluster(described("prefill", prompt_steps=30), described("decode", decode_steps=30), silent))
    assert profile == ClusterProfile(
        [WorkerProfile("prefill", PLAIN, 100, 64)], [WorkerProfile("decode", PLAIN, 100, 64)]
    )


def test_a_worker_of_both_roles_counts_as_either() -> None:
    profile = read_profile(cluster(described("both", prompt_steps=30, decode_steps=30)))
    assert profile.prefill == profile.decode


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((29, 500), r"30 steps with parts of prompts yet \(at most 29\): send requests"),
        ((500, 29), r"30 steps that only decode yet \(at most 29\)"),
    ],
)
def test_too_few_steps_are_no_profile(steps: tuple[int, int], message: str) -> None:
    prefill, decode = described("prefill", prompt_steps=steps[0]), described("decode", decode_steps=steps[1])
    with pytest.raises(UnavailableError, match=message):
        read_profile(cluster(prefill, decode))


def test_the_report() -> None:
    """Prompts of 110 ms; 40 sequences at a time. Hand-worked above."""
    profile = ClusterProfile([worker()], [worker()])
    lines = list(report(profile, Workload(100, 11, 1.0, 0.050), rate=20, num_workers=4))
    assert lines[0].startswith("prefill: a prompt takes 0.110 s; one worker serves ")
    assert lines[1].startswith("decode: 40 sequences at a time, in steps of 50.0 ms (one: 11.0 ms); one worker serves ")
    assert lines[2].endswith("prefill workers per decode worker")
    assert lines[3].startswith("for 20 requests/s: 3 prefill and 1 decode workers, so that 90% of the requests")
    # 20/s of 110 ms are more than one prefill worker can do.
    assert lines[4].endswith(
        "workers that were measured: 0% in time for the first token, 100% between tokens: goodput 0.00 requests/s"
    )
    assert lines[5].startswith("of 4 workers: 3 prefill and 1 decode serve ")


def test_the_report_says_when_no_number_is_enough() -> None:
    profile = ClusterProfile([worker()], [worker()])
    lines = list(report(profile, Workload(100, 11, 0.1, 0.005), rate=20))
    assert lines == [
        "prefill: a prompt takes 0.110 s, which is too long for a first token within 0.1 s",
        "decode: a step with one sequence takes 11.0 ms already, which is too long",
        "for 20 requests/s: no number of such workers is enough; raise the objective or use larger workers",
        "the 1 prefill and 1 decode workers that were measured: 0% in time for the first token, 0% between tokens: "
        "goodput 0.00 requests/s",
    ]


def test_the_report_on_single_tokens_is_bounded_by_prefill_alone() -> None:
    profile = ClusterProfile([worker()], [worker(max_num_seqs=8)])
    # A step of one sequence takes 11 ms; there is none to be late.
    lines = list(report(profile, Workload(100, 1, 1.0, 0.001), rate=5, num_workers=4))
    assert lines[1] == (
        "decode: outputs of one token, which comes with the prompt, need no step; decode workers bound nothing"
    )
    assert not any("inf" in line.split() or "ratio" in line for line in lines)
    assert lines[-1].startswith("of 4 workers: 3 prefill and 1 decode serve ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--slo-itl", "fast"], "'fast' is not a duration such as 50ms"),
        (["--slo-itl", "0"], "'0' is not a duration"),
        (["--rate", "-1"], "-1 is not a rate"),
        (["--rate", "x"], "'x' is not a number"),
        (["--workers", "1"], "1 is too small; at least 2"),
    ],
)
def test_wrong_values_are_named(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(["--prompt-tokens", "1", "--output-tokens", "1", "--slo-ttft", "1", "--slo-itl", "50ms", *flags])
