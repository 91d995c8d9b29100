"""What the control routes take and answer."""

from typing import Annotated, Literal

from pydantic import Field

from router.request_schemas import RequestModel
from router.response_schemas import ResponseModel

Mode = Literal["abort", "wait", "keep"]

_MODE = (
    'What becomes of live requests: "abort" ends them with what they have, "wait" lets them finish, "keep" freezes '
    "them until the cluster is resumed."
)

Version = Annotated[str, Field(min_length=1, max_length=128)]


class PauseOptions(RequestModel):
    """In the query or in a JSON body."""

    mode: Mode | None = Field(None, description=f'{_MODE} Default: "abort".')
    wait_for_inflight_requests: bool | None = Field(None, description='An older spelling of mode "wait".')
    clear_cache: bool | None = Field(None, description="Also forget cached prefixes. Default: true.")


class SleepOptions(RequestModel):
    """In the query or in a JSON body."""

    level: int | None = Field(
        None, ge=1, le=2, description="1 gives the KV cache back, 2 the weights as well. Default: 1."
    )
    mode: Mode | None = Field(None, description=f'{_MODE} Default: "abort". "keep" needs a cluster without requests.')


class WakeOptions(RequestModel):
    """In the query or in a JSON body. All memory is taken at once, whatever the tags."""

    tags: list[Literal["weights", "kv_cache", "scheduling"]] | None = Field(
        None,
        description='What is needed now. With "weights" alone the cluster stays paused, else it serves again.',
    )


class UpdateWeightsRequest(RequestModel):
    """Exactly one of `path` and `uri`."""

    path: str | None = Field(None, description="Checkpoint directory on the machines of the workers; absolute.")
    uri: str | None = Field(None, description="The same as file:///PATH.")
    version: Version | None = Field(
        None, description="Label of the new weights. Default: one more than the label in use, if that is a number."
    )
    mode: Mode | None = Field(None, description=f'{_MODE} Default: "keep". A cluster that is paused stays so.')


class StatusResponse(ResponseModel):
    """What was done."""

    status: Literal["paused", "resumed", "asleep", "awake"]


class PausedResponse(ResponseModel):
    """Whether no decode worker takes requests."""

    is_paused: bool


class SleepingResponse(ResponseModel):
    """Whether a worker sleeps, and at which level the deepest one does."""

    is_sleeping: bool
    level: int


class ResetCacheResponse(ResponseModel):
    """Blocks that were cached, on all workers together."""

    status: Literal["reset"]
    num_blocks: int


class UpdateWeightsResponse(ResponseModel):
    """`num_paused_requests`: live ones that go on with the new weights."""

    version: str
    fingerprint: str
    num_paused_requests: int


class WorkerWeights(ResponseModel):
    """What one worker serves, and what it has loaded beside that."""

    id: str
    version: str
    fingerprint: str
    staged_version: str | None


class WeightInfoResponse(ResponseModel):
    """The weights that requests are served with; null before any worker that could be used has answered."""

    version: str | None
    fingerprint: str | None
    consistent: bool = Field(description="All workers that live serve these weights.")
    num_updates: int = Field(description="Updates that this router has carried out.")
    workers: list[WorkerWeights]
