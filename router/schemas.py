"""What travels over HTTP on the vLLM endpoints. `/openapi.json` is generated from these models.

Requests are strict: a boolean is not an integer, a string is not a number. An explicit null means "absent". Fields that
no model knows are ignored (`router.json_body` logs each name once).
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from common.sampling import INT64_MAX, INT64_MIN, FinishReason
from router.worker_state import State

#: fail_fast: one bad id in a prompt of 100,000 gives one error, not 100,000.
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]

INT32_MAX = 2**31 - 1


class RequestModel(BaseModel):
    """Base of everything a client sends."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class ResponseModel(BaseModel):
    """Base of everything the router answers: every field is always there, absent values are explicit nulls."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamOptions(RequestModel):
    """How a stream is cut into events; ignored without `stream`."""

    include_usage: bool | None = Field(None, description="Send the usage in a last event with no choices.")
    continuous_usage_stats: bool | None = Field(None, description="Send the usage so far in every event.")
    routed_experts: Literal["delta", "final"] | None = Field(
        None, description="delta: rows travel with their tokens; final: all rows on the terminal event."
    )
    max_event_bytes: int | None = Field(
        None, ge=1024, description="Largest event of a delta stream; one row or one token is sent whatever its size."
    )


class SamplingFields(RequestModel):
    """`sampling_params`. Fields whose description says "only" are known, and refused with any other value."""

    n: int | None = Field(None, ge=1, description="Number of choices, each with its own tokens and rows.")
    temperature: float | None = Field(None, ge=0, description="0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT32_MAX, description="0 or -1 is off.")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX, description="Drawn by the router when absent.")
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = Field(None, ge=1, description="Absent: the rest of the context; clamped to the context.")
    min_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, description="Alternatives per token; absent: no logprobs.")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, description="Vocabulary id, as a decimal string, to what is added to its logit."
    )
    routed_experts_prompt_start: int | None = Field(
        None, ge=0, description="First position whose row is returned, at most the prompt length."
    )
    return_routed_experts: bool | None = Field(None, description="False switches routing rows off for this request.")
    detokenize: bool | None = Field(None, description="No effect on token output.")
    skip_special_tokens: bool | None = Field(None, description="No effect on token output.")
    routed_experts_format: str | None = Field(None, description='Only "npy".')
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="Only 0.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="Only 0.")
    repetition_penalty: float | None = Field(None, gt=0, le=2, description="Only 1.")
    allowed_token_ids: TokenIds | None = Field(None, description="Only null or an empty list.")
    bad_words: list[str] | None = Field(None, description="Only null or an empty list.")
    stop: str | list[str] | None = Field(None, description="Only null or an empty list.")
    include_stop_str_in_output: bool | None = Field(None, description="Only false.")
    prompt_logprobs: int | None = Field(None, description="Only null.")
    structured_outputs: dict[str, Any] | None = Field(None, description="Only null or an empty object.")
    return_sampling_mask: bool | None = Field(None, description="Only false.")


class GenerateRequest(RequestModel):
    """Body of POST /inference/v1/generate: tokens in, tokens out."""

    token_ids: Annotated[TokenIds, Field(min_length=1)] = Field(
        description="Prompt; each id below the vocabulary size."
    )
    sampling_params: SamplingFields
    request_id: str | None = Field(None, description="The header X-Request-Id wins.")
    model: str | None = Field(None, description="The served name, or absent.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="Also return the prompt's ids.")
    cache_salt: str | None = Field(None, min_length=1, description="Accepted; has no effect on the output.")
    priority: int | None = Field(None, description="Accepted; has no effect on the output.")
    kv_transfer_params: dict[str, Any] | None = Field(None, description="Only null or an empty object.")


class AbortRequestsRequest(RequestModel):
    """Body of POST /inference/v1/abort_requests."""

    request_ids: list[str] = Field(min_length=1)


class AbortRequestsResponse(ResponseModel):
    """Which of the named requests were live and have been told to stop."""

    aborted: list[str]
    unknown: list[str]


class PromptTokensDetails(ResponseModel):
    """`cached_tokens`: prompt tokens of the first choice that came from a prefix cache."""

    cached_tokens: int


class Usage(ResponseModel):
    """Token counts over all choices; `completion_tokens` counts exactly the ids that are returned."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None
    completion_tokens_details: None


class Logprob(ResponseModel):
    """One vocabulary id: fp32 log-softmax of the raw logits (-9999.0 if not finite); rank 1 is the most likely."""

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


class _Choice(ResponseModel):
    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | None = Field(description="The stop token id that ended the choice; null for end-of-sequence.")
    logprobs: ChoiceLogprobs | None
    routed_experts: str | None
    sampling_mask: None
    weight_versions: list[WeightVersion] | None


class GenerateResponseChoice(_Choice):
    """One finished choice, with `g = len(token_ids)` generated tokens.

    `routed_experts` is base64 (padded, no newlines) of an .npy file. The array has shape
    `(p + g - 1 - start, num_layers, top_k)`, C order; row `i` holds the experts of position `start + i`, where `p` is
    the prompt length and `start` is `routed_experts_prompt_start` (0 if absent). The last generated token was never
    forwarded and has no row. Ids in a row are ordered by selection score, ties to the lower id; layers without experts
    hold zeros. The dtype depends on the model only: uint8 up to 256 experts, uint16 up to 65,536, int32 beyond.
    With `start == p` and `g == 1` the array is there and has no rows.

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
    prompt_logprobs: None
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
    """`exact`: every worker that may be used promises bitwise equality with a solo run."""

    status: Literal["ok"]
    exact: bool


class LiveResponse(ResponseModel):
    """The process runs."""

    status: Literal["ok"]


class VersionResponse(ResponseModel):
    """Version of moerelay."""

    version: str


class RouterView(ResponseModel):
    """The router's own state; `in_flight` counts live requests."""

    in_flight: int
    draining: bool
    ready: bool
    model: str
    version: str


class WorkerView(ResponseModel):
    """One configured worker. What it never reported is null; `refused` says why it is not used although it lives."""

    id: str
    role: Literal["prefill", "decode", "both"] | None
    address: str
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
    exact: bool | None
    instance_id: str | None
    numerics: str | None
    fingerprint: str | None


class ClusterView(ResponseModel):
    """Answer of GET /cluster; counts are at most one heartbeat old."""

    router: RouterView
    workers: list[WorkerView]
