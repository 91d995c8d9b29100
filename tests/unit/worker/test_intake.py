"""What the decode worker tells of the end of a handoff."""

from collections.abc import Callable, Sequence
from typing import cast

from common.engine.loop import Engine
from common.engine.request import RequestId
from common.sampling import SampledToken
from decode_worker.intake import Intake

ID = RequestId("r")


class BusyEngine:
    """Takes commands in order, once its step is over."""

    def __init__(self) -> None:
        self.commands: list[Callable[[], None]] = []
        self.committed: list[tuple[RequestId, Sequence[SampledToken], int]] = []

    def commit_handoff(self, request_id: RequestId, first_tokens: Sequence[SampledToken], num_cached: int) -> None:
        self.commands.append(lambda: self.committed.append((request_id, first_tokens, num_cached)))

    def run_between_steps(self, visit: Callable[[], None]) -> None:
        self.commands.append(visit)

    def end_step(self) -> None:
        for command in self.commands:
            command()


def test_the_time_to_the_next_step_counts_the_running_one() -> None:
    engine, now, observed = BusyEngine(), [100.0], list[tuple[float, int]]()
    intake = Intake(cast(Engine, engine), clock=lambda: now[0])
    intake.observe_commit = lambda seconds: observed.append((seconds, len(engine.committed)))
    intake.on_complete(ID, [SampledToken(5)], 3)
    assert not observed
    now[0] = 100.25
    engine.end_step()
    assert engine.committed == [(ID, [SampledToken(5)], 3)]
    # Observed after the engine has taken the prompt over.
    assert observed == [(0.25, 1)]


def test_nobody_has_to_observe() -> None:
    engine = BusyEngine()
    Intake(cast(Engine, engine)).on_complete(ID, [SampledToken(5)], 0)
    engine.end_step()
    assert len(engine.committed) == 1
