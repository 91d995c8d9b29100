"""That a prompt depends on its workers: from the moment that they are chosen until it needs them no more."""

from __future__ import annotations

from collections.abc import Sequence

from router.failure import Failure
from router.worker import Worker


class Dependence:
    """Of one prompt. Workers count it as load, are kept as long as it lasts, and tell it when they are lost.

    Leaving the block ends it.
    """

    def __init__(self, workers: Sequence[Worker] = (), *, num_choices: int = 1) -> None:
        """`num_choices`: what a decode worker serves; a prefill worker computes the prompt once for all of them."""
        self._num_choices = num_choices
        self._lost: dict[Worker, Failure] = {}
        self.on(workers)

    def __enter__(self) -> Dependence:
        return self

    def __exit__(self, *_error: object) -> None:
        self.release(list(self._lost))

    def on(self, workers: Sequence[Worker]) -> None:
        """From now on it depends on these too."""
        for worker in workers:
            self._lost[worker] = Failure()
            worker.depend(self._lost[worker], self._num_choices if worker.side == "decode" else 1)

    def lost(self, worker: Worker) -> Failure:
        """Is set when this worker, on which it depends, is lost."""
        return self._lost[worker]

    def release(self, workers: Sequence[Worker]) -> None:
        """It needs these no more."""
        for worker in workers:
            if lost := self._lost.pop(worker, None):
                worker.forgo(lost)
