"""What the router counts and times of its requests, read as Prometheus reads it."""

from prometheus_client.parser import text_string_to_metric_families

from router.keys import FLEET
from router.metrics import RouterMetrics
from router.processes.counter_memory import CounterMemory
from tests.unit.router.cluster import Cluster, running

Samples = dict[tuple[str, tuple[str, ...]], float]


async def samples_of(cluster: Cluster) -> Samples:
    """Values by the sample's name and the values of its labels, le excepted, of samples that are the router's."""
    async with cluster.http.get("/metrics") as response:
        text = await response.text()
    return {
        (s.name, tuple(value for label, value in sorted(s.labels.items()) if label != "le")): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.labels.get("le", "+Inf") == "+Inf"
    }


async def test_choices_are_counted_by_how_they_ended() -> None:
    async with running() as cluster:
        await cluster.generate([5, 6, 7], max_tokens=4, n=3)
        await cluster.generate([5, 6, 7], max_tokens=4, stop_token_ids=[(18 + 7) % 300])
        found = await samples_of(cluster)
    name = "moerelay_request_success_total"
    assert {key[1]: value for key, value in found.items() if key[0] == name} == {
        ("length",): 3,
        ("stop",): 1,
        ("abort",): 0,
    }


async def test_sizes_of_requests_and_of_what_they_got() -> None:
    async with running() as cluster:
        await cluster.generate([5, 6, 7], max_tokens=4, n=2)
        await cluster.stream({"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}})
        found = await samples_of(cluster)
    assert found["moerelay_request_prompt_tokens_count", ()] == 2
    assert found["moerelay_request_prompt_tokens_sum", ()] == 3 + 2
    assert found["moerelay_request_generation_tokens_count", ()] == 3
    assert found["moerelay_request_generation_tokens_sum", ()] == 4 + 4 + 3
    assert found["moerelay_request_time_per_output_token_seconds_count", ()] == 3


async def test_every_request_is_planned_once() -> None:
    async with running() as cluster:
        await cluster.generate([5, 6, 7], max_tokens=1)
        await cluster.post({"token_ids": [5], "sampling_params": {"max_tokens": 0}})
        found = await samples_of(cluster)
    assert found["moerelay_router_stage_seconds_count", ("plan",)] == 1


async def test_the_process_shows_its_cpu_time_and_memory() -> None:
    async with running() as cluster:
        found = await samples_of(cluster)
    assert found["process_cpu_seconds_total", ()] > 0
    assert found["process_resident_memory_bytes", ()] > 2**20
    assert found["moerelay_router_processes", ()] == 1


async def test_mean_time_between_tokens() -> None:
    """Of a choice whose tokens came as 1, 2 and 1 within 6 s: three intervals of 2 s."""
    now = [100.0]
    async with running() as cluster:
        metrics = RouterMetrics(lambda: 0, cluster.app[FLEET], CounterMemory.alone(), now=lambda: now[0])
    with metrics.request("generate") as clock:
        for seconds, num_tokens in ((1.0, 1), (4.0, 2), (2.0, 1)):
            now[0] += seconds
            clock.tokens(0, num_tokens)
    value = metrics.registry.get_sample_value
    assert value("moerelay_request_time_per_output_token_seconds_sum") == 2.0
    assert value("moerelay_time_to_first_token_seconds_sum") == 1.0
    assert value("moerelay_inter_token_latency_seconds_sum") == 6.0
    assert value("moerelay_e2e_request_latency_seconds_sum") == 7.0


async def test_what_a_stream_took_to_the_client() -> None:
    """20 tokens one by one, of which the first and the 17th event are timed; every event and row is counted."""
    async with running() as cluster:
        events = await cluster.stream({"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 20}})
        found = await samples_of(cluster)
    assert found["moerelay_router_events_total", ()] == 20
    assert found["moerelay_routing_rows_sent_total", ()] == 3 + 20 - 1
    assert found["moerelay_router_sent_bytes_total", ()] == sum(len(b"data: " + event + b"\n\n") for event in events)
    for stage in ("stitch", "encode", "send"):
        assert found["moerelay_router_stage_seconds_count", (stage,)] == 2
    assert found["moerelay_router_stage_seconds_count", ("place",)] == 1


async def test_bytes_of_a_whole_answer() -> None:
    async with (
        running() as cluster,
        cluster.http.post("/inference/v1/generate", json={"token_ids": [5], "sampling_params": {}}) as response,
    ):
        body = await response.read()
        found = await samples_of(cluster)
    assert found["moerelay_router_sent_bytes_total", ()] == len(body)
