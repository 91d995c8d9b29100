"""How much a step may compute, so that streams keep to their objective: bounds from measured step times. Sans-I/O.

Chunked prefill beside decodes under a budget of time is that of Sarathi-Serve (arXiv 2403.02310). There it is a number
of tokens, profiled beforehand; here it follows from what steps have taken so far on this machine.
"""

from collections.abc import Iterable, Sequence

from common.engine.objectives import Objectives
from common.engine.step_fit import StepTimeFit
from common.engine.step_times import StepWork

#: Prompt tokens that a step always has room for, so that prompts come to their end however long decodes take; beyond
#: them parts of prompts are multiples, because matrix kernels work on tiles of as many rows anyway.
FLOOR_TOKENS = 16

#: A part of a prompt may be this many times as large as the largest one measured: costs further out are unknown.
_REACH = 2

#: Decoding steps after which a batch may be one larger than is foretold to be in time. What a batch costs that is never
#: measured would never be corrected; one sequence in so many steps costs the others little.
TRIAL_STEPS = 4000

#: Positions [start, end) of a prompt that are still to be computed.
Remainder = tuple[int, int]


class Pace:
    """Foretells steps, and says how much more would still be in time.

    Args:
        max_mixed_prefill_tokens: prompt tokens beside decodes, without an ITL objective; None: as many as fit.
        max_contended_step_s: of a step with a long prompt for which short ones wait; None: however long it takes.
    """

    def __init__(
        self,
        fit: StepTimeFit,
        objectives: Objectives,
        max_mixed_prefill_tokens: int | None = None,
        max_contended_step_s: float | None = None,
    ) -> None:
        self.fit = fit
        self._itl_s = objectives.itl_s
        self._max_mixed_prefill_tokens = max_mixed_prefill_tokens
        self._max_contended_step_s = max_contended_step_s

    @property
    def bounds_decodes(self) -> bool:
        """`has_room` may say no."""
        return self._itl_s is not None and self.fit.knows_decodes

    def prompt_budget(self, decodes: StepWork, prompts: Sequence[Remainder], budget: int) -> int:
        """Prompt tokens that may be computed beside `decodes`, of `prompts` in that order; at most `budget`.

        As many as the ITL objective allows, but at least FLOOR_TOKENS. All of them where nobody decodes, who would have
        to wait.
        """
        if not decodes.decode_tokens or not prompts:
            return budget
        if self._itl_s is None:
            return min(budget, self._max_mixed_prefill_tokens or budget)
        return self._most_within(self._itl_s, decodes, prompts, budget)

    def contended_budget(self, decodes: StepWork, prompts: Sequence[Remainder], budget: int) -> int:
        """The same where short prompts wait for the step, whoever decodes; all of `budget` before any were measured."""
        if self._max_contended_step_s is None or not self.fit.knows_prompts:
            return budget
        return self._most_within(self._max_contended_step_s, decodes, prompts, budget)

    def _most_within(self, limit_s: float, decodes: StepWork, prompts: Sequence[Remainder], budget: int) -> int:
        """Prompt tokens of a step that is foretold to take no longer, but at least FLOOR_TOKENS."""
        if budget <= FLOOR_TOKENS:
            return budget
        most = min(budget, max(FLOOR_TOKENS, _REACH * self.fit.largest_prompt_step))
        if self._predict(decodes, prompts, most) <= limit_s:
            return most
        # Bisection, because a step with more tokens never takes less time.
        least, most = 1, most // FLOOR_TOKENS
        while least < most:
            middle = (least + most + 1) // 2
            if self._predict(decodes, prompts, middle * FLOOR_TOKENS) <= limit_s:
                least = middle
            else:
                most = middle - 1
        return least * FLOOR_TOKENS

    def _predict(self, decodes: StepWork, prompts: Iterable[Remainder], num_tokens: int) -> float:
        """Seconds of a step with the next `num_tokens` of the prompts, the first ones first."""
        work = decodes
        for start, end in prompts:
            part = min(num_tokens, end - start)
            work, num_tokens = work.with_prompt(part, start), num_tokens - part
            if not num_tokens:
                break
        return self.fit.times.predict(work)

    def has_room(self, decodes: StepWork, num_tokens: int) -> bool:
        """One more sequence, which knows `num_tokens`, may decode beside `decodes`.

        Either all of them are foretold to be in time, or it is tried: those that are there are, and for TRIAL_STEPS no
        batch was as large.
        """
        if self._itl_s is None or not self.fit.knows_decodes:
            return True
        num, predict = decodes.decode_tokens + 1, self.fit.times.predict
        if predict(StepWork(0, 0.0, num, decodes.decode_pairs + num_tokens)) <= self._itl_s:
            return True
        return self.fit.num_steps_below(num) >= TRIAL_STEPS and predict(decodes) <= self._itl_s

    def prompt_token_s(self, decodes: StepWork, budget: int) -> float | None:
        """Seconds per prompt token while `decodes` go on and many prompts wait; None before any have been measured.

        That of a prompt's first chunk: later ones, which attend to more, take longer.
        """
        if not self.fit.knows_prompts:
            return None
        chunk = self.prompt_budget(decodes, [(0, budget)], max(1, budget - decodes.decode_tokens))
        return self.fit.times.predict(decodes.with_prompt(chunk, 0)) / chunk
