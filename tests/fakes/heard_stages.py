"""An observer of engine stages that remembers what it was told."""

from common.engine.request import RequestId
from common.engine.stages import StageObserver


class HeardStages(StageObserver):
    """All in seconds, in order."""

    def __init__(self) -> None:
        self.waited: list[float] = []
        self.prefill: list[float] = []
        self.handoff: list[float] = []
        self.decode: list[float] = []

    def seated(self, request_id: RequestId, waited_s: float) -> None:
        self.waited.append(waited_s)

    def prefilled(self, request_id: RequestId, took_s: float) -> None:
        self.prefill.append(took_s)

    def handed_over(self, request_id: RequestId, took_s: float) -> None:
        self.handoff.append(took_s)

    def decoded(self, request_id: RequestId, took_s: float) -> None:
        self.decode.append(took_s)
