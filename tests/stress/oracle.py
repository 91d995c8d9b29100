"""What a request must have been told: its solo run, each token under the weights that it was sampled from."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

import msgspec

from common.engine.solo import SoloResult, SoloRunner
from common.model.batch import Chunk, StepOutput
from common.model.runner import ModelRunner
from tests.stress.asks import Ask
from tests.stress.model import StressModel, label_of, version_of

#: Slots of the oracle's store: more than any request may have.
NUM_SLOTS = 512
#: Another one than most engines under test have.
BLOCK_SIZE = 32


class _ChangingRunner:
    """A `Runner` that computes its n-th step with the n-th of the given weights, later ones with the last."""

    def __init__(self, model: StressModel, runner: ModelRunner) -> None:
        self._model = model
        self._runner = runner
        self._versions: Sequence[int] = (0,)
        self._num_steps = 0

    def begin(self, versions: Sequence[int]) -> None:
        self._versions, self._num_steps = versions, 0

    def prepare(self, chunks: Sequence[Chunk]) -> None:
        """Nothing: plans are made when they are needed."""

    def execute(self, chunks: Sequence[Chunk]) -> StepOutput:
        version = self._versions[min(self._num_steps, len(self._versions) - 1)]
        self._runner.use(self._model.decoder(version))
        self._num_steps += 1
        return self._runner.execute(chunks)


class Oracle:
    """Solo runs on one model, each of which is made once."""

    def __init__(self, model: StressModel) -> None:
        store = model.store(NUM_SLOTS // BLOCK_SIZE + 1, BLOCK_SIZE)
        self._runner = _ChangingRunner(model, ModelRunner(model.decoder(0), store))
        self._solo = SoloRunner(self._runner, store, model.config.eos_token_ids)
        self._known: dict[tuple[Ask, int, tuple[int, ...]], SoloResult] = {}

    def run(self, ask: Ask, routing_start: int | None, choice: int, labels: Sequence[str]) -> SoloResult:
        """The answer when the tokens are sampled under the weights of these labels, the rest under those of the last.

        Args:
            labels: at least one.
        """
        result = self._run(ask, choice, _shortest([version_of(label) % 2 for label in labels]))
        tokens = tuple(
            msgspec.structs.replace(token, weight_version=label)
            for token, label in zip_longest(result.tokens, labels[: len(result.tokens)], fillvalue=labels[-1])
            if not isinstance(token, str)
        )
        rows_TLK = None
        if routing_start is not None and result.rows_TLK is not None:
            rows_TLK = result.rows_TLK[routing_start:]
        return replace(result, tokens=tokens, rows_TLK=rows_TLK)

    def runs_of_each(self, ask: Ask, routing_start: int | None, choice: int) -> list[SoloResult]:
        """The answers under either weights alone."""
        return [self.run(ask, routing_start, choice, [label_of(version)]) for version in (0, 1)]

    def _run(self, ask: Ask, choice: int, versions: tuple[int, ...]) -> SoloResult:
        """With the rows of all positions; labels are the oracle's own."""
        key = (ask, choice, versions)
        if key not in self._known:
            self._runner.begin(versions)
            self._known[key] = self._solo.run(ask.prompt, ask.sampling, 0, choice=choice, matcher=ask.matcher)
        return self._known[key]


def _shortest(versions: list[int]) -> tuple[int, ...]:
    """Without what only repeats at the end."""
    while len(versions) > 1 and versions[-1] == versions[-2]:
        versions.pop()
    return tuple(versions)
