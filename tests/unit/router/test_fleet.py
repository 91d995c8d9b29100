"""Who may serve: heartbeats, pairing field by field, placement."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from common.config import RouterSettings
from common.pb import types_pb2, worker_pb2
from common.rpc import PROTOCOL_VERSION
from router.fleet import Fleet
from router.keys import FLEET
from router.pairing import Member, leader
from router.worker import Worker
from router.worker_state import State, WorkerState, pause_s
from tests.e2e.cluster import until
from tests.fakes.fake_workers import FakeWorker, Script, description
from tests.ports import reserved_address
from tests.unit.router.cluster import HEARTBEAT_S, Cluster, over, running

#: The fakes do not look at it.
NO_CONTEXT: Any = None

BODY = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}}

UNEQUAL: dict[str, Any] = {
    "family": "mixtral",
    "fingerprint": "beef",
    "weight_version": "8",
    "dtype": "bfloat16",
    "numerics": "other",
    "num_layers": 3,
    "num_experts": 16,
    "top_k": 1,
    "vocab_size": 301,
    "max_model_len": 64,
    "block_size": 32,
    "num_kv_planes": 1,
    "num_kv_heads": 4,
    "head_dim": 16,
    "routing_dtype": "uint16",
    "routing_enabled": False,
    "eos_token_ids": [2, 3],
}


def test_every_field_of_the_description_is_tried() -> None:
    assert set(UNEQUAL) == {field.name for field in types_pb2.ModelDescription.DESCRIPTOR.fields}


def pair(prefill: types_pb2.ModelDescription) -> tuple[list[FakeWorker], list[FakeWorker]]:
    return (
        [FakeWorker("prefill-0", types_pb2.ROLE_PREFILL, Script(prefill))],
        [FakeWorker("decode-0", types_pb2.ROLE_DECODE, Script())],
    )


async def assert_refused(cluster: Cluster, worker_id: str, reason: str) -> None:
    """The worker is named with its reason, nothing is served, and no worker hears of a request."""
    status, answer = await cluster.get("/ready")
    assert (status, answer["error"]["type"]) == (503, "ServiceUnavailableError")
    _, view = await cluster.get("/cluster")
    refused = {worker["id"]: worker["refused"] for worker in view["workers"]}
    assert reason in refused[worker_id]
    status, answer = await cluster.post(BODY)
    assert status == 503
    assert reason in answer["error"]["message"]
    assert all(not worker.decode_requests for worker in cluster.decode)
    async with cluster.http.get("/metrics") as response:
        text = await response.text()
    assert f'moerelay_worker_refused{{role="{worker_id[:-2]}",worker="{worker_id}"}} 1.0' in text
    assert f'moerelay_worker_up{{role="{worker_id[:-2]}",worker="{worker_id}"}} 1.0' in text
    assert f'moerelay_workers_usable{{role="{worker_id[:-2]}"}} 0.0' in text


@pytest.mark.parametrize("field", UNEQUAL)
async def test_workers_that_differ_in_one_field_are_not_paired(field: str) -> None:
    prefills, decodes = pair(description(**{field: UNEQUAL[field]}))
    async with over(prefills, decodes) as cluster:
        await assert_refused(cluster, "prefill-0", "routing capture" if field == "routing_enabled" else f"{field} is ")


async def test_unequal_routing_switches_are_refused_also_without_rows() -> None:
    prefills, decodes = pair(description(routing_enabled=False))
    async with over(prefills, decodes, enable_return_routed_experts=False) as cluster:
        await assert_refused(cluster, "prefill-0", "routing_enabled is True on decode-0 and False on prefill-0")


async def test_protocol_versions_must_be_equal() -> None:
    prefills, decodes = pair(description())
    prefills[0].protocol_version = PROTOCOL_VERSION + 1
    async with over(prefills, decodes) as cluster:
        await assert_refused(cluster, "prefill-0", f"protocol version {PROTOCOL_VERSION + 1}")


async def test_a_worker_listed_on_the_wrong_side_is_refused() -> None:
    script = Script()
    wrong = FakeWorker("prefill-0", types_pb2.ROLE_DECODE, script)
    async with over([wrong], [FakeWorker("decode-0", types_pb2.ROLE_DECODE, script)]) as cluster:
        await assert_refused(cluster, "prefill-0", "listed under --prefill and says its role is ROLE_DECODE")


async def test_order_of_end_of_sequence_ids_does_not_matter() -> None:
    prefills, decodes = pair(description(eos_token_ids=[2, 3]))
    decodes[0].script.model = description(eos_token_ids=[3, 2])
    async with over(prefills, decodes) as cluster:
        assert (await cluster.get("/ready"))[0] == 200


async def test_a_misfit_leaves_the_others_serving() -> None:
    prefills, decodes = pair(description())
    prefills.insert(0, FakeWorker("prefill-1", types_pb2.ROLE_PREFILL, Script(description(dtype="bfloat16"))))
    async with over(prefills, decodes) as cluster:
        for _ in range(3):
            await cluster.canary()
        assert (len(prefills[0].prefill_requests), len(prefills[1].prefill_requests)) == (0, 3)


@pytest.mark.parametrize("wrong", [0, 1])
async def test_one_decode_worker_that_is_wrong_leaves_the_others_serving(wrong: int) -> None:
    """Wherever it stands in the configuration."""
    prefills, decodes = pair(description())
    decodes.insert(wrong, FakeWorker("decode-9", types_pb2.ROLE_DECODE, Script(description(fingerprint="beef"))))
    async with over(prefills, decodes) as cluster:
        assert (await cluster.get("/ready"))[0] == 200
        await cluster.canary()
        _, view = await cluster.get("/cluster")
        refused = {worker["id"]: worker["refused"] for worker in view["workers"] if worker["refused"]}
        assert refused == {"decode-9": "fingerprint is 'f00d' on decode-0 and 'beef' on decode-9"}
        async with cluster.http.get("/metrics") as response:
            assert 'moerelay_worker_refused{role="decode",worker="decode-9"} 1.0' in await response.text()


async def test_the_other_group_takes_over_when_the_first_cannot_serve() -> None:
    """As in a rolling change of the weights: the old workers drain, the new ones serve."""
    old, new = Script(), Script(description(fingerprint="beef", weight_version="8"))
    prefills = [FakeWorker(f"prefill-{i}", types_pb2.ROLE_PREFILL, script) for i, script in enumerate((old, new))]
    decodes = [FakeWorker(f"decode-{i}", types_pb2.ROLE_DECODE, script) for i, script in enumerate((old, new))]
    async with over(prefills, decodes) as cluster:
        versions = []
        for _ in range(2):
            (choice,) = (await cluster.generate([5, 6, 7], max_tokens=1))["choices"]
            versions.append(choice["weight_versions"][0]["version"])
            decodes[0].draining = True
            await cluster.until_settled()
            cluster.app[FLEET].review()
    assert versions == ["7", "8"]


DECODE, PREFILL, BOTH = types_pb2.ROLE_DECODE, types_pb2.ROLE_PREFILL, types_pb2.ROLE_BOTH


def member(name: str, role: types_pb2.Role.ValueType, *, healthy: bool = True, draining: bool = False) -> Member:
    """The first letter of a worker's name is its weights."""
    status = worker_pb2.WorkerStatus(worker_id=name, role=role, model=description(fingerprint=name[0]))
    return Member(status, healthy=healthy, draining=draining)


LEADERS: list[tuple[str, list[Member]]] = [
    ("the first of equals", [member("a1", DECODE), member("b1", DECODE), member("a2", PREFILL), member("b2", PREFILL)]),
    ("the larger", [member("b1", BOTH), member("a1", BOTH), member("a2", BOTH)]),
    ("a pair before many without", [*(member(f"b{i}", DECODE) for i in range(5)), member("a1", BOTH)]),
    ("healthy", [member("b1", BOTH, healthy=False), member("b2", BOTH, healthy=False), member("a1", BOTH)]),
    (
        "a suspect pair before none",
        [member("b1", DECODE), member("b2", DECODE), member("a1", DECODE, healthy=False), member("a2", PREFILL)],
    ),
    (
        "those that stay",
        [member("b1", BOTH), member("b2", BOTH, healthy=False, draining=True), member("a1", BOTH), member("a2", BOTH)],
    ),
    ("the larger of two that cannot serve", [member("b1", PREFILL), member("a1", DECODE), member("a2", DECODE)]),
]


@pytest.mark.parametrize(("_", "members"), LEADERS, ids=[name for name, _ in LEADERS])
def test_who_serves_together(_: str, members: list[Member]) -> None:
    status = leader(members)
    assert status is not None
    assert status.worker_id == "a1"


def test_nobody_leads_nobody() -> None:
    assert leader([]) is None


async def test_draining_workers_get_nothing_new() -> None:
    async with running(decode=2) as cluster:
        cluster.decode[0].draining = True
        await cluster.until_settled()
        _, view = await cluster.get("/cluster")
        assert [worker["state"] for worker in view["workers"]] == ["healthy", "draining", "healthy"]
        for _ in range(3):
            await cluster.canary()
        assert (len(cluster.decode[0].decode_requests), len(cluster.decode[1].decode_requests)) == (0, 3)


async def test_idle_workers_take_turns() -> None:
    async with running(prefill=2, decode=3, heartbeat_interval_s=60) as cluster:
        for _ in range(6):
            await cluster.canary()
        assert [len(worker.decode_requests) for worker in cluster.decode] == [2, 2, 2]
        assert [len(worker.prefill_requests) for worker in cluster.prefill] == [3, 3]


def test_a_worker_is_dead_until_it_is_heard() -> None:
    state = WorkerState(silence_limit_s=3)
    assert state.at(0) is State.DEAD
    state.heard(10, draining=False)
    assert state.at(10) is State.HEALTHY


def test_one_miss_is_suspect_and_two_are_dead() -> None:
    state = WorkerState(silence_limit_s=3)
    state.heard(10, draining=False)
    state.missed()
    assert state.at(10.5) is State.SUSPECT
    state.missed()
    assert state.at(10.6) is State.DEAD
    state.heard(11, draining=False)
    assert state.at(11) is State.HEALTHY


def test_silence_is_suspect() -> None:
    state = WorkerState(silence_limit_s=3)
    state.heard(10, draining=True)
    assert state.at(13) is State.DRAINING
    assert state.at(13.1) is State.SUSPECT


def test_requests_that_fail_never_make_a_worker_dead() -> None:
    state = WorkerState(silence_limit_s=3)
    state.heard(10, draining=False)
    for _ in range(5):
        state.suspect()
    assert state.at(10) is State.SUSPECT


async def test_decode_workers_wait_with_their_prefill_workers() -> None:
    """A decode worker that came up in a pause is not paused, but nobody could compute its prompts."""
    async with running() as cluster:
        await cluster.prefill[0].Pause(worker_pb2.PauseRequest(mode=worker_pb2.PAUSE_MODE_KEEP), NO_CONTEXT)
        await cluster.until_settled()
        status, answer = await cluster.post(BODY)
        assert (status, answer["error"]["type"]) == (503, "PausedError")
        assert (await cluster.get("/ready"))[0] == 503
        await cluster.prefill[0].Resume(worker_pb2.ResumeRequest(), NO_CONTEXT)
        await cluster.until_settled()
        await cluster.canary()


async def test_choices_that_have_ended_since_a_heartbeat_are_no_load() -> None:
    """A heartbeat tells choices, and a prompt may have several."""
    script = Script(hold_after=0)
    async with running(script, both=True, heartbeat_interval_s=60) as cluster:
        [worker], [decode] = cluster.app[FLEET].workers, cluster.decode
        body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 1, "n": 8}}
        request = asyncio.ensure_future(cluster.post(body))
        await decode.wait_until(lambda: len(decode.decode_requests) == 1)
        assert worker.load == 8
        worker.described.load.running = 8
        worker._choices_at_heartbeat = 8
        assert worker.load == 8
        script.release.set()
        assert (await request)[0] == 200
        assert worker.load == 0


async def test_a_proxy_of_the_environment_sees_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens there: with the proxy no worker would be healthy."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    async with running(both=True) as cluster:
        await cluster.canary()


@pytest.mark.parametrize(
    ("dead_s", "seconds"), [(0, 0.5), (3, 0.5), (4, 0.5), (8, 1.0), (12, 1.5), (16, 2.0), (10**6, 2.0)]
)
def test_dead_workers_are_asked_more_and_more_rarely(dead_s: float, seconds: float) -> None:
    """And one that comes back after a week is found within two seconds."""
    assert pause_s(dead_s, 0.5) == seconds


@pytest.fixture
def refusing() -> Iterator[list[str]]:
    """Addresses that refuse connections."""
    with ExitStack() as stack:
        yield [stack.enter_context(reserved_address()) for _ in range(5)]


class NeverCalled:
    """A stub of a worker that refuses connections."""

    def __getattr__(self, name: str) -> None:
        raise AssertionError(f"{name} was called")


async def test_a_worker_that_refuses_connections_is_not_called_again(refusing: list[str]) -> None:
    worker = Worker(refusing[0], "decode", max_message_bytes=2**20, silence_limit_s=3)
    try:
        await worker.heartbeat(HEARTBEAT_S)
        assert worker.was_asked
        stub: Any = NeverCalled()
        worker.control = stub
        for _ in range(5):
            await worker.heartbeat(HEARTBEAT_S)
        assert worker.state is State.DEAD
    finally:
        await worker.close()


class CountingBeats(Worker):
    num_beats = 0

    async def heartbeat(self, timeout_s: float) -> None:
        await super().heartbeat(timeout_s)
        self.num_beats += 1


class CountingReviews(Fleet):
    num_reviews = 0

    def review(self) -> None:
        self.num_reviews += 1
        super().review()


async def test_workers_that_go_on_being_dead_are_no_news(refusing: list[str]) -> None:
    """What follows from all workers' states is decided anew when one may have changed, not with every heartbeat."""
    fleet = CountingReviews(RouterSettings(decode=refusing, heartbeat_interval_s=0.001))
    beating = list(fleet.workers)
    for worker in beating:
        worker.__class__ = CountingBeats

    async def all_have_beaten_often() -> bool:
        return all(isinstance(worker, CountingBeats) and worker.num_beats > 50 for worker in beating)

    async with fleet.running():
        await until(all_have_beaten_often, 60)
        assert fleet.num_reviews == 1 + len(refusing)
