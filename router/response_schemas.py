"""What the router answers: every field is always there, absent values are explicit nulls."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from common.sampling import FinishReason
from router.worker_state import State


class ResponseModel(BaseModel):
    """Base of everything the router answers: every field is always there, absent values are explicit nulls."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class AbortRequestsResponse(ResponseModel):
    """Which of the named requests were live and have been told to stop."""

    aborted: list[str]
    unknown: list[str]


class PromptTokensDetails(ResponseModel):
    """`cached_tokens`: prompt tokens, over all prompts, that were found in a prefix cache instead of computed."""

    cached_tokens: int


class Usage(ResponseModel):
    """Token counts over all choices; `completion_tokens` counts exactly the ids that are returned."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None
    completion_tokens_details: None


class Logprob(ResponseModel):
    """One vocabulary id; -9999.0 stands for what is not finite, and rank 1 is the most likely.

    Values are the fp32 log-softmax of the raw logits; with --logprobs-mode processed_logprobs, of the logits after
    penalties, bias, temperature and filters.
    """

    token_id: int
    logprob: float
    rank: int


class TokenLogprobs(Logprob):
    """One generated token with its alternatives, the generated one first."""

    top_logprobs: list[Logprob]


class ChoiceLogprobs(ResponseModel):
    """One entry per id of the same choice's `token_ids`."""

    content: list[TokenLogprobs]


class WeightVersion(ResponseModel):
    """Generated tokens `start` (included) to `end` (excluded) were computed with the weights labelled `version`."""

    version: str
    start: int
    end: int


class RoutedExperts(ResponseModel):
    """Rows as an object. `data` comes first: prime-rl's client looks for it in the text, without parsing JSON."""

    data: str = Field(description="Base64 of the array's little-endian bytes, C order.")
    shape: list[int] = Field(description="[rows, num_layers, top_k]")
    dtype: Literal["uint8", "uint16", "int16", "int32"]
    start: int = Field(description="Position of the first row.")


class PromptLogprob(ResponseModel):
    """One vocabulary id at one prompt position, as `Logprob`."""

    logprob: float
    rank: int
    decoded_token: str | None = Field(description="The id's text, on the endpoints that speak text.")


#: By vocabulary id, as a decimal string: the prompt's own token first. Null at position 0, which follows nothing.
PromptLogprobEntry = dict[str, PromptLogprob] | None


class _Choice(ResponseModel):
    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = Field(
        description="The stop token id, or the stop string, that ended the choice; null for end-of-sequence."
    )
    logprobs: ChoiceLogprobs | None
    routed_experts: str | RoutedExperts | None
    sampling_mask: list[list[int]] | None = Field(
        description="Per token the vocabulary ids that survived top-k, top-p and min-p, ascending, its own included."
    )
    weight_versions: list[WeightVersion] | None


class GenerateResponseChoice(_Choice):
    """One finished choice, with `g = len(token_ids)` generated tokens.

    `routed_experts` is base64 (padded, no newlines) of an .npy file. The array has shape
    `(p + g - 1 - start, num_layers, top_k)`, C order; row `i` holds the experts of position `start + i`, where `p` is
    the prompt length and `start` is `routed_experts_prompt_start` (0 if absent). The last generated token was never
    forwarded and has no row. Ids in a row are ordered by selection score, ties to the lower id; layers without experts
    hold zeros. The dtype depends on the model only: uint8 up to 256 experts, uint16 up to 65,536, int32 beyond.
    With `start == p` and `g == 1` the array is there and has no rows. With `routed_experts_format: "dict"` it is an
    object instead, see `RoutedExperts`.

    It is null if the server or the request switched routing off, and if the choice was aborted before its first token
    (`g = 0`). A choice that was aborted later has the rows of the tokens it returns.
    """

    finish_reason: FinishReason


class GenerateResponse(ResponseModel):
    """Answer of POST /inference/v1/generate without `stream`."""

    request_id: str
    model: str
    created: int = Field(description="Seconds since the epoch.")
    usage: Usage
    prompt_logprobs: list[PromptLogprobEntry] | None = Field(description="One entry per prompt token.")
    prompt_token_ids: list[int] | None
    choices: list[GenerateResponseChoice]


class GenerateResponseStreamChoice(_Choice):
    """What one event adds to one choice: `token_ids` and `logprobs` are deltas, `finish_reason` is set once, last.

    `routed_experts` has the form of `GenerateResponseChoice.routed_experts`, with as many rows as the event carries.
    `stream_options.routed_experts = "delta"`: the non-null arrays of a choice, joined in order, equal the array of the
    non-streaming answer; after an event that brings the choice to `g >= 1` tokens, the rows so far are
    `p - start + g - 1`. Rows of a prompt may travel in events with empty `token_ids`. An event without rows has null;
    a choice that ends with no rows at all carries an empty array on its last event. `"final"`: null but on the last
    event, which carries the whole array.

    If a choice ends with finish reason "abort" and no token, rows that were sent before are void. `weight_versions` is
    null but on the last event.
    """


class GenerateStreamResponse(ResponseModel):
    """One event of a stream. The usage event, if asked for, has no choices and is the last one before [DONE]."""

    request_id: str
    usage: Usage | None
    prompt_token_ids: list[int] | None = Field(description="On the first event, if `return_token_ids` asked for it.")
    choices: list[GenerateResponseStreamChoice]


class ErrorDetail(ResponseModel):
    """`param` names the field that is wrong, where there is one; `code` is the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(ResponseModel):
    """Every error, as the body of a non-2xx answer or as the last event of a broken stream."""

    error: ErrorDetail


class ModelCard(ResponseModel):
    """One entry of GET /v1/models."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str | None
    parent: None
    max_model_len: int | None = Field(description="Context in tokens; null until a worker has answered.")


class ModelList(ResponseModel):
    """Answer of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class HealthResponse(ResponseModel):
    """`exact`: every worker that may be used promises bitwise equality with a solo run.

    `fallback`: decode workers compute the prompts too, because no prefill worker is healthy.
    """

    status: Literal["ok"]
    exact: bool
    fallback: bool


class LiveResponse(ResponseModel):
    """The process runs."""

    status: Literal["ok"]


class VersionResponse(ResponseModel):
    """Version of moerelay."""

    version: str


class RouterView(ResponseModel):
    """The router's own state over all of its processes.

    `in_flight` counts live requests, `fallback` is that of /health, `processes` are those that answer.
    """

    in_flight: int
    draining: bool
    ready: bool
    processes: int
    fallback: bool
    model: str
    version: str


class StepTimesView(ResponseModel):
    """What a worker's steps take, as measured so far: seconds, each to be multiplied by its count.

    `experts_s` times `1 - unread ** tokens`; a pair is a token and a position that it attends to. `moerelay advise`
    reads them.
    """

    fixed_s: float
    experts_s: float
    prompt_token_s: float
    prompt_pair_s: float
    decode_token_s: float
    decode_pair_s: float
    unread: float
    prompt_steps: int
    decode_steps: int
    error: float


class WorkerView(ResponseModel):
    """One configured worker. What it never reported is null; `refused` says why it is not used although it lives."""

    id: str
    role: Literal["prefill", "decode", "both"] | None
    address: str
    #: What lists it, as --prefill or --decode has it: dns://decode:7002.
    source: str
    pid: int | None
    state: State
    refused: str | None
    running: int | None
    waiting: int | None
    handoffs: int | None
    kv_blocks_used: int | None
    kv_blocks_cached: int | None
    kv_blocks_total: int | None
    weight_version: str | None
    pause: Literal["running", "pausing", "paused"] | None
    sleep_level: int | None
    exact: bool | None
    instance_id: str | None
    numerics: str | None
    #: What --kernels chose there; part of `numerics`.
    kernels: str | None
    fingerprint: str | None
    cpus: str | None
    threads: int | None
    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    step_times: StepTimesView | None


class ClusterView(ResponseModel):
    """Answer of GET /cluster; counts are at most one heartbeat old."""

    router: RouterView
    workers: list[WorkerView]
