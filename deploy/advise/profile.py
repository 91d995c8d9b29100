"""What a running cluster has measured of itself, read from /cluster."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.engine.step_times import StepTimes
from common.errors import UnavailableError
from deploy.client import Json

#: Fewer steps tell too little to plan with.
MIN_STEPS = 30


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """One worker's step times and bounds."""

    name: str
    times: StepTimes
    chunk_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class ClusterProfile:
    """Workers that compute prompts, and workers that decode; with role both they are the same."""

    prefill: Sequence[WorkerProfile]
    decode: Sequence[WorkerProfile]


def read_profile(cluster: Json) -> ClusterProfile:
    """The profile in an answer of GET /cluster.

    Raises:
        UnavailableError: a side has no worker that has measured enough; the message says what to send.
    """
    workers = [worker for worker in cluster["workers"] if worker["step_times"] is not None]
    prefill = [w for w in workers if w["role"] in ("prefill", "both")]
    decode = [w for w in workers if w["role"] in ("decode", "both")]
    return ClusterProfile(_measured(prefill, "prompt"), _measured(decode, "decode"))


def _measured(workers: Sequence[Json], kind: str) -> list[WorkerProfile]:
    steps = f"{kind}_steps"
    found = [_profile(worker) for worker in workers if worker["step_times"][steps] >= MIN_STEPS]
    if not found:
        most = max((worker["step_times"][steps] for worker in workers), default=0)
        what = "with parts of prompts" if kind == "prompt" else "that only decode"
        raise UnavailableError(
            f"no worker has measured {MIN_STEPS} steps {what} yet (at most {most}): send requests like those that are "
            "to be planned for, then ask again"
        )
    return found


def _profile(worker: Json) -> WorkerProfile:
    times = StepTimes(**{name: float(worker["step_times"][name]) for name in StepTimes._fields})
    return WorkerProfile(worker["id"], times, worker["max_num_batched_tokens"], worker["max_num_seqs"])
