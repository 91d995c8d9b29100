"""The structs of SGLang's answers, as `router.forms`; a field that nobody set is absent from the JSON."""

from msgspec import UNSET, Struct, UnsetType

from router.forms import Base64, Form, WeightVersion
from router.sglang.response_schemas import InputLogprobTriple, LogprobTriple


class SglangFinishReason(Form, frozen=True, gc=False):
    type: str
    matched: int | str | UnsetType = UNSET
    length: int | UnsetType = UNSET
    message: str | UnsetType = UNSET


class SglangMetaInfo(Struct, gc=False):
    id: str
    finish_reason: SglangFinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    weight_versions: list[WeightVersion]
    e2e_latency: float
    output_token_logprobs: list[LogprobTriple] | UnsetType = UNSET
    output_top_logprobs: list[list[LogprobTriple]] | UnsetType = UNSET
    input_token_logprobs: list[InputLogprobTriple] | UnsetType = UNSET
    input_top_logprobs: list[list[LogprobTriple] | None] | UnsetType = UNSET
    routed_experts: Base64 | UnsetType = UNSET
    routed_experts_start_len: int | UnsetType = UNSET


class SglangOutput(Form, frozen=True, gc=False):
    text: str
    output_ids: list[int]
    meta_info: SglangMetaInfo
    index: int | UnsetType = UNSET
