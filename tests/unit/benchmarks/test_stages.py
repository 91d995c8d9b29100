"""The parts of stages that need no server."""

from collections import Counter
from itertools import pairwise

import pytest

from benchmarks.machine import this_machine
from benchmarks.report import rounded, sentence
from benchmarks.stages.handoff_latency import sums
from benchmarks.stages.mixed import Phase, quantile
from benchmarks.stages.parts import read_handoff, read_router
from benchmarks.stages.stage import balanced
from benchmarks.table import Samples

EXPOSITION = """\
# TYPE moerelay_handoff_tail_seconds histogram
moerelay_handoff_tail_seconds_bucket{le="+Inf"} 3.0
moerelay_handoff_tail_seconds_count 3.0
moerelay_handoff_tail_seconds_sum 0.75
# TYPE moerelay_handoff_commit_seconds histogram
moerelay_handoff_commit_seconds_bucket{le="+Inf",role="decode",worker="a"} 1.0
moerelay_handoff_commit_seconds_count{role="decode",worker="a"} 1.0
moerelay_handoff_commit_seconds_sum{role="decode",worker="a"} 0.25
moerelay_handoff_commit_seconds_bucket{le="+Inf",role="decode",worker="b"} 1.0
moerelay_handoff_commit_seconds_count{role="decode",worker="b"} 1.0
moerelay_handoff_commit_seconds_sum{role="decode",worker="b"} 0.5
"""


@pytest.mark.parametrize(("conditions", "num_rounds"), [("ab", 2), ("abc", 6), ("abcd", 4), ("abcde", 10)])
def test_every_condition_follows_each_other_equally_often(conditions: str, num_rounds: int) -> None:
    rounds = [balanced(conditions, number) for number in range(num_rounds)]
    assert all(sorted(order) == list(conditions) for order in rounds)
    count, times = len(conditions), num_rounds // len(conditions)
    followed = Counter(pair for order in rounds for pair in pairwise(order))
    assert list(followed.values()) == [times] * (count * (count - 1))
    assert list(Counter(order[0] for order in rounds).values()) == [times] * count
    assert rounds == [balanced(conditions, num_rounds + number) for number in range(num_rounds)]


def test_few_conditions_need_no_order() -> None:
    assert [balanced("", 3), balanced("a", 3)] == [[], ["a"]]


def test_a_peer_below_its_best_is_told() -> None:
    about = {"date": "d", "commit": "c", "machine": this_machine().to_json(), "vllm": "1"}
    assert "best" not in sentence({**about, "warning": None})
    assert sentence({**about, "warning": "it ran below its best"}).endswith(" **it ran below its best.**")


def test_histograms_are_added_over_workers() -> None:
    assert sums(EXPOSITION) == {"first token to acknowledgement": 0.75, "first token to running batch": 0.75}
    assert sums("") == {}


def test_quantiles() -> None:
    values = [float(value) for value in range(1, 201)]
    assert [quantile(values, share) for share in (0.5, 0.99, 1.0)] == [101, 199, 200]


def test_a_phase_in_milliseconds() -> None:
    samples = Samples()
    Phase(gaps_s=[0.02, 0.01, 0.03], num_tokens=60, ttfts_s=[0.5], wall_s=2.0).add_to(samples, "ours", "mixed")
    found = {quantity.name: samples.values("ours", quantity.name)[0] for quantity in samples.quantities("ours")}
    assert found == {
        "mixed: gap p50": 20.0,
        "mixed: gap p99": 30.0,
        "mixed: gap max": 30.0,
        "mixed: background": 30.0,
        "mixed: TTFT of the long prompts": 500.0,
    }


def test_the_router_s_report() -> None:
    runs = [{"cpu_us_per_event": 30.0, "events_per_s": 1.0}, {"cpu_us_per_event": 40.0, "events_per_s": 1.0}]
    cost = {"shape": {"name": "16 streams"}, "router": runs, "raw": runs[::-1]}
    samples = read_router({"cost": [cost]})
    assert samples.values("router", "16 streams") == [30.0, 40.0]
    assert samples.values("raw aiohttp writer", "16 streams") == [40.0, 30.0]


def test_the_handoff_s_report() -> None:
    series = {"condition": "handoff", "name": "512 tokens", "unit": "GB/s", "higher_is_better": True, "values": [1.5]}
    samples = read_handoff({"ipc": [series], "tcp": [{**series, "values": [0.5]}]})
    assert samples.values("handoff", "512 tokens, ipc") == [1.5]
    assert samples.values("handoff", "512 tokens, tcp") == [0.5]


def test_results_have_no_digits_that_mean_nothing() -> None:
    assert rounded({"a": [1.23456789, 2], "b": ("x", None)}) == {"a": [1.2346, 2], "b": ["x", None]}
