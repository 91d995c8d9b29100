"""Learns the coefficients of `StepTimes` from steps, one after the other. No clock: durations are arguments.

Non-negative least squares on exponentially forgotten normal equations, by one sweep of coordinate descent per step
(Franc, Hlaváč and Navara, "Sequential coordinate-wise algorithm for the non-negative least squares problem", 2005).
Each step starts from the coefficients of the one before, so that they follow a machine that becomes slower or faster.
"""

from operator import mul

from common.engine.step_times import StepTimes, StepWork, features

#: Weight that a step keeps with each later one of its kind: the last 100 or so decide.
MEMORY = 0.99

#: Of each kind, before what is learned from them counts: a process's first steps are slow for reasons of their own.
NUM_TRIAL_STEPS = 8

_NUM_FEATURES = 6

#: Smaller sums of squares are all but forgotten; dividing by them would say nothing.
_FORGOTTEN = 1e-30

Matrix = list[list[float]]


class _Equations:
    """Normal equations of the steps of one kind; each forgets with its own steps only.

    Otherwise a worker that only decodes for a while would forget what prompts cost.
    """

    def __init__(self) -> None:
        self.matrix: Matrix = [[0.0] * _NUM_FEATURES for _ in range(_NUM_FEATURES)]
        self.vector = [0.0] * _NUM_FEATURES
        self.num_steps = 0

    def add(self, row: list[float]) -> None:
        """A step whose features are `row`, and whose duration is 1."""
        self.num_steps += 1
        vector, matrix = self.vector, self.matrix
        for at, factor in enumerate(row):
            vector[at] = MEMORY * vector[at] + factor
            if factor or matrix[at][at] > _FORGOTTEN:
                matrix[at] = [MEMORY * old + factor * new for old, new in zip(matrix[at], row)]  # noqa: B905 - dear


class StepTimeFit:
    """The engine's own measure of itself; one thread writes, any may read.

    What is kept small is the *relative* error: a prediction that is 10 % wrong is as bad for a short step as for a long
    one. That also makes it robust: a step of a second between steps of ten milliseconds, because the machine stood
    still, has a weight of one in ten thousand.
    """

    def __init__(self, num_experts: int, top_k: int) -> None:
        self.times = StepTimes(unread=1.0 - top_k / num_experts)
        self._decodes = _Equations()
        self._prompts = _Equations()
        #: Prompt tokens of the largest step so far: what is far beyond it is not known.
        self.largest_prompt_step = 0
        #: Steps in which somebody decoded; and by how many decoded, which of them was the last one.
        self._num_decoding = 0
        self._last_of: dict[int, int] = {}
        #: Of the steps that could be foretold: what they took, what was predicted, and the mean relative error lately.
        self.measured_s = 0.0
        self.predicted_s = 0.0
        self.error = 0.0

    @property
    def knows_prompts(self) -> bool:
        """Steps with parts of prompts have been measured."""
        return self._prompts.num_steps >= NUM_TRIAL_STEPS

    @property
    def knows_decodes(self) -> bool:
        """Steps that only decode have been measured."""
        return self._decodes.num_steps >= NUM_TRIAL_STEPS

    @property
    def num_prompt_steps(self) -> int:
        return self._prompts.num_steps

    @property
    def num_decode_steps(self) -> int:
        """Those without prompts."""
        return self._decodes.num_steps

    def num_steps_below(self, num_decodes: int) -> int:
        """Steps since one in which at least so many decoded, of those in which anybody did; by the writing thread."""
        return self._num_decoding - max((last for num, last in self._last_of.items() if num >= num_decodes), default=0)

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step has computed `work` in `seconds`, which must be more than 0."""
        kind = self._prompts if work.prompt_tokens else self._decodes
        if kind.num_steps >= NUM_TRIAL_STEPS:
            self._judge(self.times.predict(work), seconds)
        if work.prompt_tokens > self.largest_prompt_step:
            self.largest_prompt_step = work.prompt_tokens
        if work.decode_tokens:
            self._num_decoding += 1
            self._last_of[work.decode_tokens] = self._num_decoding
        scale, unread = 1.0 / seconds, self.times.unread
        kind.add([scale * each for each in features(work, unread)])
        self.times = StepTimes._make([*self._swept(), unread])

    def _judge(self, predicted: float, seconds: float) -> None:
        self.measured_s += seconds
        self.predicted_s += predicted
        # Capped: a machine that stood still says nothing about the model.
        self.error += (1.0 - MEMORY) * (min(1.0, abs(predicted / seconds - 1.0)) - self.error)

    def _swept(self) -> list[float]:
        """Each coefficient in turn becomes the best one that is not negative, given all others."""
        solution = list(self.times[:_NUM_FEATURES])
        decodes, prompts = self._decodes, self._prompts
        for at in range(_NUM_FEATURES):
            of_decodes, of_prompts = decodes.matrix[at], prompts.matrix[at]
            curvature = of_decodes[at] + of_prompts[at]
            if curvature > _FORGOTTEN:
                slope = sum(map(mul, of_decodes, solution)) + sum(map(mul, of_prompts, solution))
                slope -= decodes.vector[at] + prompts.vector[at]
                solution[at] = max(0.0, solution[at] - slope / curvature)
        return solution
