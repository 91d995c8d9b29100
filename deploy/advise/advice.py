"""How many workers of each kind a workload needs, and what goodput to expect. Pure; docs/operating.md has the formulas.

A prefill worker is an M/D/1 queue of prompts, as in DistServe (arXiv 2401.09670, section 3.1): its mean wait at a load
`u` of a service time `T` is `u T / (2 (1 - u))`. The share that waits longer than `w` falls off exponentially in heavy
traffic (Kingman, 1961), about as `u exp(-2 (1 - u) w / T)`.

A decode worker holds as many sequences as arrive while one is decoded (Little, 1961). With Poisson arrivals there
are Poisson many, whatever the outputs' lengths are (M/G/∞); all goes well while it is at most the largest batch
whose steps keep to the ITL objective.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from common.engine.step_times import StepWork
from deploy.advise.profile import WorkerProfile

#: Share of requests that are to keep to their objective: what DistServe and its successors plan for.
TARGET = 0.9

#: Halvings of an interval: far finer than anything that is measured.
_NUM_HALVINGS = 50


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests as they are to be planned for; all alike."""

    prompt_tokens: int
    #: At least 1.
    output_tokens: int
    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class PrefillAdvice:
    """What one prefill worker can do."""

    #: Seconds that one prompt takes.
    prompt_s: float
    ttft_s: float

    def attainment(self, rate: float) -> float:
        """Share of the prompts, coming at `rate` per second, whose first token is in time."""
        load = rate * self.prompt_s
        slack = self.ttft_s - self.prompt_s
        if slack < 0 or load >= 1:
            return 0.0
        return 1.0 - load * math.exp(-2.0 * (1.0 - load) * slack / self.prompt_s)

    @property
    def max_rate(self) -> float:
        """Prompts per second of which TARGET are in time; 0 if none can be."""
        return _largest(lambda rate: self.attainment(rate) >= TARGET, 1.0 / self.prompt_s)


@dataclass(frozen=True, slots=True)
class DecodeAdvice:
    """What one decode worker can do."""

    worker: WorkerProfile
    #: Sequences that may decode together with every step in time; 0 if not even one may.
    batch: int
    #: Keys that a sequence attends to, on average over its output.
    context: float
    #: Steps per request: the first token comes with the prompt.
    num_steps: int

    def step_s(self, num_seqs: float) -> float:
        """Seconds of a step with that many sequences."""
        work = StepWork(0, 0.0, 0, num_seqs * self.context)
        times = self.worker.times
        tokens = times.decode_token_s * num_seqs + times.experts_s * (1.0 - math.pow(times.unread, num_seqs))
        return times.predict(work) + tokens

    def num_seqs(self, rate: float) -> float:
        """Sequences that decode at a time, on average, when requests come at `rate`; infinite if ever more do."""
        if not self.num_steps or not rate:
            return 0.0
        # The largest number whose sequences leave as fast as they come; more than the batch is too late anyway.
        num_seqs = rate * self.num_steps * self.step_s(0)
        for _ in range(_NUM_HALVINGS):
            if num_seqs > self.batch:
                return math.inf
            num_seqs = rate * self.num_steps * self.step_s(num_seqs)
        return num_seqs

    def attainment(self, rate: float) -> float:
        """Share of the requests whose steps are in time."""
        if not self.num_steps:
            return 1.0
        return _poisson_at_most(self.batch, self.num_seqs(rate))

    @property
    def max_rate(self) -> float:
        """Requests per second of which TARGET are in time; infinite if outputs are a single token."""
        if not self.num_steps:
            return math.inf
        if not self.batch:
            return 0.0
        return _largest(lambda rate: self.attainment(rate) >= TARGET, self.batch / (self.num_steps * self.step_s(1)))


def prefill_advice(worker: WorkerProfile, workload: Workload) -> PrefillAdvice:
    """Prompts one after the other, each in chunks of the worker's own size."""
    return PrefillAdvice(worker.times.prompt_s(workload.prompt_tokens, worker.chunk_tokens), workload.ttft_s)


def decode_advice(worker: WorkerProfile, workload: Workload) -> DecodeAdvice:
    """The largest batch is that at the mean context; a step that computes more never takes less time."""
    context = workload.prompt_tokens + workload.output_tokens / 2
    unbounded = DecodeAdvice(worker, worker.max_num_seqs, context, workload.output_tokens - 1)
    sizes = range(1, worker.max_num_seqs + 1)
    batch = sum(unbounded.step_s(size) <= workload.itl_s for size in sizes)
    return DecodeAdvice(worker, batch, context, workload.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Split:
    """Workers of each kind, and the requests per second that they serve in time."""

    num_prefill: int
    num_decode: int
    goodput: float


def needed(rate: float, max_rate: float) -> int | None:
    """Workers for requests that come at `rate`; None if no number is enough."""
    return max(1, math.ceil(rate / max_rate - 1e-9)) if max_rate > 0 else None


def best_split(num_workers: int, prefill_rate: float, decode_rate: float) -> Split:
    """Of so many equal workers, at least 2, the split that serves most; in a tie the one with fewer prefill workers.

    `prefill_rate`, `decode_rate`: what one worker of the kind serves in time, per second.
    """
    splits = [
        Split(num, num_workers - num, min(num * prefill_rate, (num_workers - num) * decode_rate))
        for num in range(1, num_workers)
    ]
    return max(splits, key=lambda split: (split.goodput, -split.num_prefill))


def _largest(holds: Callable[[float], bool], bound: float) -> float:
    """The largest rate up to `bound` for which `holds`, which fails for all rates above one for which it fails."""
    least, most = 0.0, bound
    if not holds(least):
        return 0.0
    for _ in range(_NUM_HALVINGS):
        middle = (least + most) / 2
        if holds(middle):
            least = middle
        else:
            most = middle
    return least


def _poisson_at_most(number: int, mean: float) -> float:
    """Probability that a Poisson variable is at most `number`."""
    if not math.isfinite(mean):
        return 0.0
    return (
        math.fsum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(number + 1)) if mean else 1.0
    )
