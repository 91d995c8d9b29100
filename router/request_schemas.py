"""What clients send to the vLLM endpoints. `/openapi.json` is generated from these models.

Requests are strict: a boolean is not an integer, a string is not a number. An explicit null means "absent". Fields that
no model knows are ignored (`router.json_body` logs each name once).
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from common.sampling import INT64_MAX, INT64_MIN

#: fail_fast: one bad id in a prompt of 100,000 gives one error, not 100,000.
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]

INT32_MAX = 2**31 - 1


class RequestModel(BaseModel):
    """Base of everything a client sends."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


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
