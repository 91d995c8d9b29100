"""One worker's pause, weights and sleep: what may follow what, and that the engine is frozen exactly while paused."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
import pytest_asyncio

from common.engine.loop import Engine
from common.engine.request import RequestId, Work
from common.errors import ConflictError, InvalidRequestError, PausedError
from common.kv.pool import BlockPool
from common.model.decoder import MoeDecoder
from common.model.loader import LoadedModel
from common.pb import types_pb2
from common.worker.control import PauseMode, PauseState, WorkerControl
from common.worker.lifecycle import Lifecycle
from common.worker.weights import Weights
from tests.fakes.fake_runner import FakeRunner, fake_store
from tests.unit.engine.rig import EOS, greedy, limits, make_request

MODES = list(PauseMode)


class Rig:
    """A control over a real engine; calls and checkpoints are the test's."""

    def __init__(self) -> None:
        self.store = fake_store(9)
        self.runner = FakeRunner(self.store)
        self.pool = BlockPool(9)
        self.engine = Engine(
            self.runner, self.store, self.pool, limits(), EOS, lambda events: self.engine.events_delivered()
        )
        self.lifecycle = Lifecycle()
        #: Fingerprint of what any directory holds.
        self.on_disk = "f8"
        #: Versions put to use, with whether there are weights and on which thread.
        self.used: list[tuple[str, bool, str]] = []
        description = types_pb2.ModelDescription(weight_version="7", fingerprint="f7", vocab_size=300)
        self.weights = Weights(description, Path("/"), self._load, self._use)
        self.control = WorkerControl(self.engine, self.store, self.weights, self.lifecycle, self)
        self._live: dict[RequestId, asyncio.Event] = {}
        self.aborted: list[str] = []

    async def _load(self, path: Path) -> LoadedModel:
        return LoadedModel(cast(MoeDecoder, object()), self.on_disk)

    def _use(self, decoder: MoeDecoder | None, version: str) -> None:
        self.used.append((version, decoder is not None, threading.current_thread().name))

    def num_cached(self) -> int:
        return self.pool.num_cached

    def live_requests(self) -> list[RequestId]:
        return list(self._live)

    async def abort(self, request_id: RequestId, choice: int | None = None) -> bool:
        self.aborted.append(request_id)
        self.end(request_id)
        return True

    def end(self, name: str) -> None:
        self._live[RequestId(name)].set()

    @asynccontextmanager
    async def live_call(self, name: str) -> AsyncIterator["asyncio.Task[None]"]:
        """A call that is live until `end` or an abort."""
        ended = self._live[RequestId(name)] = asyncio.Event()

        async def serve() -> None:
            with self.lifecycle.serving():
                await ended.wait()
            del self._live[RequestId(name)]

        call = asyncio.create_task(serve())
        await asyncio.sleep(0)
        assert self.lifecycle.num_live == 1
        yield call
        ended.set()
        await call

    def assert_state(self, state: PauseState) -> None:
        assert self.control.state is state
        assert self.engine.frozen == (state is PauseState.PAUSED)
        assert self.control.check_invariants() == []

    def assert_refuses(self, refuses: bool) -> None:
        """Requests from outside are refused while paused; those that another worker has admitted never are."""
        with self.lifecycle.serving(admitted=True):
            pass
        if refuses:
            with pytest.raises(PausedError, match="paused"), self.lifecycle.serving():
                pass
        else:
            with self.lifecycle.serving():
                pass


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    rig.engine.start()
    yield rig
    rig.runner.gate.set()
    await asyncio.to_thread(rig.engine.stop)


# --- pause


@pytest.mark.parametrize("mode", MODES)
async def test_an_idle_worker_pauses_and_resumes(rig: Rig, mode: PauseMode) -> None:
    rig.assert_refuses(False)
    for _ in range(2):  # idempotent
        await rig.control.pause(mode)
        rig.assert_state(PauseState.PAUSED)
        rig.assert_refuses(True)
    for _ in range(2):
        await rig.control.resume()
        rig.assert_state(PauseState.RUNNING)
        rig.assert_refuses(False)


async def test_keep_freezes_with_live_requests_and_abort_ends_them_later(rig: Rig) -> None:
    async with rig.live_call("a") as call:
        await rig.control.pause(PauseMode.KEEP)
        rig.assert_state(PauseState.PAUSED)
        await rig.control.pause(PauseMode.WAIT)  # paused is paused: what is frozen could never finish
        assert not call.done()
        await rig.control.pause(PauseMode.ABORT)
        assert call.done()
        rig.assert_state(PauseState.PAUSED)
    assert rig.aborted == ["a"]


async def test_wait_computes_until_the_last_request_has_ended(rig: Rig) -> None:
    async with rig.live_call("a"):
        pause = asyncio.create_task(rig.control.pause(PauseMode.WAIT))
        await asyncio.sleep(0)
        rig.assert_state(PauseState.PAUSING)
        rig.assert_refuses(True)
        rig.end("a")
        await pause
        rig.assert_state(PauseState.PAUSED)
    assert rig.aborted == []


@pytest.mark.parametrize("stronger", [PauseMode.KEEP, PauseMode.ABORT])
async def test_a_stronger_mode_ends_the_waiting(rig: Rig, stronger: PauseMode) -> None:
    async with rig.live_call("a") as call:
        waiting = asyncio.create_task(rig.control.pause(PauseMode.WAIT))
        await asyncio.sleep(0)
        await rig.control.pause(stronger)
        await waiting
        rig.assert_state(PauseState.PAUSED)
        assert call.done() == (stronger is PauseMode.ABORT)


async def test_a_resume_ends_the_waiting_with_an_error(rig: Rig) -> None:
    async with rig.live_call("a") as call:
        waiting = asyncio.create_task(rig.control.pause(PauseMode.WAIT))
        await asyncio.sleep(0)
        await rig.control.resume()
        with pytest.raises(ConflictError, match="resumed"):
            await waiting
        rig.assert_state(PauseState.RUNNING)
        rig.assert_refuses(False)
        assert not call.done()


async def test_a_resume_ends_a_freeze_that_waits_for_a_handoff(rig: Rig) -> None:
    """The handoff never comes. Nor does what was to follow the pause happen."""
    rig.engine.submit(make_request("lease", [5, 6], greedy(3), work=Work.DECODE))
    for _ in range(2):  # the request has come in, and the step that grants its lease is over
        await asyncio.to_thread(rig.engine.check_invariants)
    pauses = [asyncio.create_task(rig.control.pause(PauseMode.KEEP)) for _ in range(2)]
    await asyncio.sleep(0)
    commit = asyncio.create_task(rig.control.commit_weights("8"))
    await asyncio.to_thread(rig.engine.check_invariants)  # the freeze has begun
    assert not any(task.done() for task in (*pauses, commit))
    rig.assert_state(PauseState.PAUSING)
    await asyncio.wait_for(rig.control.resume(), 30)
    for pause in pauses:
        with pytest.raises(ConflictError, match="resumed"):
            await pause
    with pytest.raises(ConflictError, match="pause it first"):
        await commit
    rig.assert_state(PauseState.RUNNING)
    rig.assert_refuses(False)
    assert not rig.engine.frozen
    rig.engine.cancel(RequestId("lease"))
    await rig.control.pause(PauseMode.KEEP)
    rig.assert_state(PauseState.PAUSED)
    assert rig.used == []


async def test_a_pause_that_was_resumed_does_not_take_part_in_the_next_one(rig: Rig) -> None:
    async with rig.live_call("a"):
        first = asyncio.create_task(rig.control.pause(PauseMode.WAIT))
        await asyncio.sleep(0)
        await rig.control.resume()
        second = asyncio.create_task(rig.control.pause(PauseMode.WAIT))
        await asyncio.sleep(0)
        with pytest.raises(ConflictError):
            await first
        rig.assert_state(PauseState.PAUSING)
        rig.end("a")
        await second
        rig.assert_state(PauseState.PAUSED)


async def test_a_caller_that_gives_up_waiting_leaves_the_worker_pausing(rig: Rig) -> None:
    async with rig.live_call("a"):
        waiting = asyncio.create_task(rig.control.pause(PauseMode.WAIT))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        rig.assert_state(PauseState.PAUSING)
        await rig.control.resume()
        rig.assert_state(PauseState.RUNNING)


async def test_a_change_goes_on_when_its_caller_gives_up(rig: Rig) -> None:
    """A step stands still; the caller does not wait for the freeze that follows it."""
    rig.runner.gate.clear()
    rig.engine.submit(make_request("a", [5, 6], greedy(3)))
    await asyncio.to_thread(rig.runner.entered.wait, 30)
    pause = asyncio.create_task(rig.control.pause(PauseMode.KEEP))
    await asyncio.sleep(0)
    pause.cancel()
    await asyncio.gather(pause, return_exceptions=True)
    rig.assert_state(PauseState.PAUSING)
    rig.runner.gate.set()
    await rig.control.pause(PauseMode.KEEP)
    rig.assert_state(PauseState.PAUSED)
    await rig.control.resume()
    rig.assert_state(PauseState.RUNNING)


# --- weights


async def test_weights_are_replaced_between_steps_of_a_paused_worker(rig: Rig) -> None:
    before = rig.weights.description
    assert await rig.control.stage_weights("/", "8") == "f8"
    assert (rig.weights.staged_version, rig.weights.version, rig.used) == ("8", "7", [])
    with pytest.raises(ConflictError, match="running"):
        await rig.control.commit_weights("8")
    await rig.control.pause(PauseMode.KEEP)
    with pytest.raises(ConflictError, match="'9' is not staged"):
        await rig.control.commit_weights("9")
    await rig.control.commit_weights("8")
    assert rig.used == [("8", True, "engine")]
    description = rig.weights.description
    assert (description.weight_version, description.fingerprint, description.vocab_size) == ("8", "f8", 300)
    assert before.weight_version == "7"  # whoever holds the old description keeps it
    assert (rig.weights.staged_version, rig.weights.num_updates) == ("", 1)
    with pytest.raises(ConflictError, match="nothing is"):
        await rig.control.commit_weights("8")
    rig.assert_state(PauseState.PAUSED)


async def test_discarded_weights_cannot_be_committed(rig: Rig) -> None:
    await rig.control.stage_weights("/", "8")
    rig.control.discard_weights()
    await rig.control.pause(PauseMode.KEEP)
    with pytest.raises(ConflictError):
        await rig.control.commit_weights("8")
    assert rig.used == []


# --- prefix cache


async def fill(rig: Rig) -> None:
    """Serves a prompt of two full blocks."""
    rig.engine.submit(make_request("fill", [5, 6, 7, 8, 9, 10, 11, 12], greedy(1)))
    async with asyncio.timeout(10):  # any number of visits may fit in before the step
        while await asyncio.wrap_future(rig.engine.run_between_steps(rig.num_cached)) != 2:
            pass


async def test_a_reset_tells_how_many_blocks_were_cached(rig: Rig) -> None:
    await fill(rig)
    assert [await rig.control.reset_prefix_cache() for _ in range(2)] == [2, 0]


@pytest.mark.parametrize("level", [1, 2])
async def test_sleep_empties_the_prefix_cache(rig: Rig, level: int) -> None:
    await fill(rig)
    rig.on_disk = "f7"  # the weights that level 2 gives back
    await rig.control.pause(PauseMode.WAIT)
    await rig.control.sleep(level)
    assert await asyncio.wrap_future(rig.engine.run_between_steps(rig.num_cached)) == 0
    assert await rig.control.reset_prefix_cache() == 0
    await rig.control.wake_up()
    assert rig.engine.check_invariants() == []


# --- sleep


@pytest.mark.parametrize("level", [1, 2])
async def test_sleep_gives_memory_back_and_wake_up_takes_it_again(rig: Rig, level: int) -> None:
    rig.on_disk = "f7"
    shape = rig.store.kv_LCSGD.shape
    with pytest.raises(ConflictError, match="running"):
        await rig.control.sleep(level)
    await rig.control.pause(PauseMode.KEEP)
    await rig.control.sleep(level)
    assert rig.control.sleep_level == level
    assert rig.store.kv_LCSGD.numel() == 0
    assert rig.used == ([("7", False, "engine")] if level == 2 else [])
    with pytest.raises(ConflictError, match="wake it up"):
        await rig.control.resume()
    rig.assert_state(PauseState.PAUSED)
    await rig.control.wake_up()
    assert rig.control.sleep_level == 0
    assert rig.store.kv_LCSGD.shape == shape
    assert rig.used[1:] == ([("7", True, "engine")] if level == 2 else [])
    rig.assert_state(PauseState.PAUSED)
    await rig.control.wake_up()  # does nothing
    await rig.control.resume()
    rig.assert_state(PauseState.RUNNING)


async def test_a_worker_with_live_requests_does_not_sleep(rig: Rig) -> None:
    async with rig.live_call("a"):
        await rig.control.pause(PauseMode.KEEP)
        with pytest.raises(ConflictError, match="1 requests are live"):
            await rig.control.sleep(1)
    assert rig.store.kv_LCSGD.numel() > 0


@pytest.mark.parametrize("level", [0, 3])
async def test_there_are_two_levels(rig: Rig, level: int) -> None:
    await rig.control.pause(PauseMode.KEEP)
    with pytest.raises(InvalidRequestError, match="1 or 2"):
        await rig.control.sleep(level)


async def test_sleep_may_become_deeper_but_not_lighter(rig: Rig) -> None:
    await rig.control.pause(PauseMode.KEEP)
    for level, expected in ((1, 1), (2, 2), (1, 2)):
        await rig.control.sleep(level)
        assert rig.control.sleep_level == expected
    assert rig.used == [("7", False, "engine")]


async def test_weights_that_changed_on_disk_are_not_taken_for_the_old_ones(rig: Rig) -> None:
    """A trainer writes its next checkpoint over the last one: that must become a version of its own."""
    await rig.control.pause(PauseMode.KEEP)
    await rig.control.sleep(2)
    with pytest.raises(ConflictError, match="other weights than version '7'"):
        await rig.control.wake_up()
    assert rig.control.sleep_level == 2
    await rig.control.stage_weights("/", "8")
    await rig.control.commit_weights("8")
    await rig.control.wake_up()
    await rig.control.resume()
    assert rig.used == [("7", False, "engine"), ("8", True, "engine")]
    rig.assert_state(PauseState.RUNNING)
