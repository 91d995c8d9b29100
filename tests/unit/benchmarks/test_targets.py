"""Verdicts, with values that are easy to divide."""

import pytest

from benchmarks.bound import Roofline
from benchmarks.spread import Spread
from benchmarks.stages.names import AGGREGATED, AGGREGATED_OFF, DISAGGREGATED, DISAGGREGATED_SERVER, PEER, PEER_SERVER
from benchmarks.table import Quantity, Samples
from benchmarks.targets import Results, Target, all_targets, table, worst_ratio
from tests.unit.benchmarks.test_bound import SMALL


def results(**stages: Samples) -> Results:
    return Results({name.replace("_", " "): samples for name, samples in stages.items()}, None, None)


def samples(name: str, higher_is_better: bool, **values: list[float]) -> Samples:
    found = Samples()
    for condition, numbers in values.items():
        for number in numbers:
            found.add(condition, Quantity(name, "", higher_is_better), number)
    return found


def named(values: dict[str, list[float]], quantity: str) -> Samples:
    found = Samples()
    for condition, numbers in values.items():
        for number in numbers:
            found.add(condition, Quantity(quantity, "", True), number)
    return found


def line(found: Results, begins: str) -> str:
    [row] = [row for row in table(found, all_targets(100)) if row.startswith(f"| {begins}")]
    return row


def test_what_was_not_measured_says_so() -> None:
    rows = list(table(results(), all_targets(100)))[2:]
    assert len(rows) == 22
    assert all("not measured" in row and "met" not in row and "missed" not in row for row in rows)


def test_time_to_first_token() -> None:
    stage = named({AGGREGATED: [6.0, 7.0, 6.5], PEER: [10.0, 10.0, 10.0]}, "TTFT 512")
    row = line(results(serving=stage), "TTFT 512")
    assert row == "| TTFT 512 to vLLM's, aggregated | ≤ 0.65 × | – | 0.65 (0.60–0.70) × | met |"


def test_a_rate_that_is_too_low() -> None:
    stage = named({AGGREGATED: [159.0], PEER: [100.0]}, "decode C=4")
    row = line(results(serving=stage), "decode C=4")
    assert row.endswith("| ≥ 1.6 × | – | 1.59 (1.59–1.59) × | **missed** |")


def test_the_cost_of_rows_has_a_third_digit() -> None:
    stage = named({AGGREGATED: [98.9], AGGREGATED_OFF: [100.0]}, "decode C=16")
    assert "| 0.989 (0.989–0.989) × | **missed** |" in line(results(rows=stage), "rows on to rows off, decode C=16")


def test_the_bound_of_the_machine_stands_beside_the_target() -> None:
    """512 tokens are 2 · (512 · 736 + 80) operations and 32 per layer and pair, of which there are 131,328."""
    flop = 2 * (512 * 736 + 80) + 2 * 131_328 * 32
    stage = named({AGGREGATED: [100.0], PEER: [200.0]}, "TTFT 512")
    found = Results({"serving": stage}, Roofline(1e9, flop / 0.05), SMALL)
    assert "| ≤ 0.65 × | 0.25 × | 0.50 (0.50–0.50) × | met |" in line(found, "TTFT 512")


def test_mixed_load_is_judged_by_one_prefill_and_one_decode_worker() -> None:
    stage = named({DISAGGREGATED: [1.2, 1.3, 1.4], PEER: [0.1]}, "gap p99, mixed to quiet")
    assert line(results(mixed=stage), "mixed load, 1P+1D: gap").endswith("| 1.30 (1.20–1.40) × | met |")


def test_handoff_latency_is_taken_where_the_batch_begins_if_that_is_told() -> None:
    stage = named({DISAGGREGATED: [9.0]}, "first token to acknowledgement")
    assert line(results(handoff_latency=stage), "end of prefill").endswith("| 9.00 (9.00–9.00) ms | **missed** |")
    stage.extend(named({DISAGGREGATED: [4.0]}, "first token to running batch"))
    assert line(results(handoff_latency=stage), "end of prefill").endswith("| 4.00 (4.00–4.00) ms | met |")


def test_the_slowest_size_of_a_transport_counts_for_the_handoff() -> None:
    stage = Samples()
    for name, rate in {"512 tokens, ipc": 8.0, "2048 tokens, ipc": 6.0, "512 tokens, tcp": 1.0}.items():
        stage.extend(named({"handoff": [rate], "pyzmq, copy=False": [10.0]}, name))
    row = line(results(handoff=stage), "handoff rate to raw pyzmq, ipc")
    assert row.endswith("| 0.60 (0.60–0.60) × | **missed** |")


def test_the_router_is_judged_at_both_paces() -> None:
    stage = samples("64 streams, every 100 ms", False, **{"router": [30.0], "raw aiohttp writer": [20.0]})
    stage.extend(samples("16 streams, as fast as possible", False, **{"router": [30.0], "raw aiohttp writer": [5.0]}))
    found = results(router=stage)
    assert line(found, "router CPU per event to a raw aiohttp write, events").endswith("| 1.50 (1.50–1.50) × | met |")
    assert line(found, "router CPU per event to a raw aiohttp write, as").endswith(
        "| 6.00 (6.00–6.00) × | **missed** |"
    )


def test_exactness_is_judged_with_the_kernels_as_served_and_with_torch_s_alone() -> None:
    stage = samples("prefill", False, exact=[8.0], torch=[11.0], inexact=[10.0])
    stage.extend(samples("decode", False, exact=[9.0], torch=[10.0], inexact=[10.0]))
    found = results(exactness=stage)
    ends = " to torch's fastest inexact ones"
    assert line(found, f"kernels as served{ends}").endswith("| 0.900 (0.900–0.900) × | met |")
    assert line(found, f"torch's exact kernels{ends}").endswith("| 1.10 (1.10–1.10) × | **missed** |")


def test_start_is_that_of_a_whole_cluster() -> None:
    stage = named({DISAGGREGATED_SERVER: [10.0], PEER_SERVER: [40.0]}, "start until it serves")
    assert line(results(startup=stage), "start until it serves").endswith("| 0.25 (0.25–0.25) × | met |")


def test_the_worst_of_several_quantities() -> None:
    found = samples("small", False, ours=[2.0], theirs=[1.0])
    found.extend(samples("large", False, ours=[30.0], theirs=[10.0]))
    found.extend(samples("rate", True, ours=[5.0], theirs=[10.0]))
    assert worst_ratio(found, "ours", "theirs") == Spread(3.0, 3.0, 3.0)
    assert worst_ratio(Samples(), "ours", "theirs") is None


@pytest.mark.parametrize(("median", "at_most", "met"), [(1.0, True, True), (1.1, True, False), (0.9, False, False)])
def test_the_median_decides(median: float, at_most: bool, met: bool) -> None:
    target = Target("x", 1.0, at_most, "×", lambda _: None, lambda _: None)
    assert target.is_met(Spread(median, 0.0, 9.0)) is met
