"""From an SGLang request to an `Ask`, and from the names in an error back to SGLang's. Sans-I/O."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from common.errors import InvalidRequestError, RequestError
from router.plan import Ask
from router.request_schemas import SamplingFields, StructuredOutputs
from router.sglang.request_schemas import SglangGenerateRequest, SglangSamplingParams
from router.text.tokenizer import Tokenizer
from router.validate import tokenizer_or_refusal

_UNSUPPORTED = (
    *("token_ids_logprob", "input_embeds", "image_data", "video_data", "audio_data", "lora_path", "session_params"),
    *("custom_logit_processor", "return_hidden_states", "return_entropy"),
)
_UNSUPPORTED_SAMPLING = ("stop_regex", "structural_tag", "custom_params")

#: SGLang's name of what the planner calls otherwise.
_NAMES = {
    "request_id": "rid",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "routed_experts_prompt_start": "routed_experts_start_len",
}


def prompts_of(body: SglangGenerateRequest, tokenizer: Tokenizer | None, max_model_len: int | None) -> list[list[int]]:
    """The prompts as token ids. Encodes texts, which takes a while for long ones.

    Raises:
        InvalidRequestError: not exactly one of `input_ids` and `text`, an empty prompt, text without a tokenizer, or
            text that is surely too long for the context.
    """
    if (body.input_ids is None) == (body.text is None):
        raise InvalidRequestError("send exactly one of input_ids and text", param="input_ids")
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        _check_not_empty(texts, "text")
        known = tokenizer_or_refusal(tokenizer, "text")
        for text in texts:
            known.check_fits(text, max_model_len, param="text")
        return [known.encode(text, add_special_tokens=True, param="text") for text in texts]
    ids = body.input_ids or []
    # Not each of them: there may be millions.
    prompts = cast(list[list[int]], ids if isinstance((*ids[:1], None)[0], list) else [ids])
    _check_not_empty(prompts, "input_ids")
    return prompts


def count_prompts(body: SglangGenerateRequest) -> int:
    """How many there are, before any is looked at."""
    if isinstance(body.text, list):
        return len(body.text)
    ids = body.input_ids or []
    return len(ids) if any(isinstance(each, list) for each in ids[:1]) else 1


def is_batch(body: SglangGenerateRequest, sampling: SglangSamplingParams) -> bool:
    """Whether the answer is a list."""
    several_prompts = isinstance(body.text, list) or any(isinstance(each, list) for each in (body.input_ids or [])[:1])
    return several_prompts or (sampling.n or 1) > 1


def ask_of(
    body: SglangGenerateRequest, sampling: SglangSamplingParams, prompts: Sequence[Sequence[int]], *, wants_text: bool
) -> Ask:
    """Raises InvalidRequestError for what cannot be honoured here."""
    _refuse_unsupported(body, _UNSUPPORTED)
    _refuse_unsupported(sampling, _UNSUPPORTED_SAMPLING)
    shortest = min(map(len, prompts))
    start = logprob_start(body)
    if start is not None and start > shortest:
        raise InvalidRequestError(
            f"logprob_start_len must be at most the prompt's {shortest} tokens, got {start}", param="logprob_start_len"
        )
    return Ask(
        prompts,
        _sampling_fields(body, sampling),
        prompt_param="input_ids" if body.text is None else "text",
        # vLLM's scale, on which lower is sooner.
        priority=-(body.priority or 0),
        cache_salt=_cache_salt(body),
        wants_text=wants_text,
    )


def _cache_salt(body: SglangGenerateRequest) -> str:
    if body.extra_key and body.cache_salt:
        raise InvalidRequestError("send only one of extra_key and cache_salt", param="extra_key")
    return body.extra_key or body.cache_salt or ""


def logprob_start(body: SglangGenerateRequest) -> int | None:
    """First prompt position with a logprob; None if the request asks for none of the prompt."""
    start = body.logprob_start_len
    return start if body.return_logprob and start is not None and start >= 0 else None


@contextmanager
def sglang_names(sampling: SglangSamplingParams) -> Iterator[None]:
    """Errors that name a field name it as SGLang does."""
    grammars = [name for name in ("json_schema", "regex", "ebnf") if getattr(sampling, name) is not None]
    names = _NAMES | {"structured_outputs": grammars[0] if grammars else "json_schema"}
    try:
        yield
    except RequestError as error:
        if error.param not in names:
            raise
        message = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), error.message)
        raise type(error)(message, param=names[error.param]) from error


def _check_not_empty(prompts: Sequence[Sequence[object]], param: str) -> None:
    if not prompts or not all(prompts):
        raise InvalidRequestError(f"{param}: the prompt is empty; send at least one token", param=param)


def _refuse_unsupported(fields: SglangGenerateRequest | SglangSamplingParams, names: Sequence[str]) -> None:
    for name in names:
        if getattr(fields, name):
            raise InvalidRequestError(f"{name} is not supported; leave it out", param=name)


def _sampling_fields(body: SglangGenerateRequest, sampling: SglangSamplingParams) -> SamplingFields:
    num_top = (body.top_logprobs_num or 0) if body.return_logprob else None
    return SamplingFields(
        n=sampling.n,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.sampling_seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        include_stop_str_in_output=sampling.no_stop_trim,
        max_tokens=sampling.max_new_tokens,
        min_tokens=sampling.min_new_tokens,
        logprobs=num_top,
        prompt_logprobs=None if logprob_start(body) is None else num_top,
        skip_special_tokens=sampling.skip_special_tokens,
        structured_outputs=_structured_outputs(sampling),
        routed_experts_prompt_start=body.routed_experts_start_len,
        return_routed_experts=bool(body.return_routed_experts),
    )


def _structured_outputs(sampling: SglangSamplingParams) -> StructuredOutputs | None:
    wanted = {"json": sampling.json_schema, "regex": sampling.regex, "grammar": sampling.ebnf}
    given = {name: value for name, value in wanted.items() if value is not None}
    if len(given) > 1:
        raise InvalidRequestError("send only one of json_schema, regex and ebnf", param="json_schema")
    return StructuredOutputs.model_validate(given) if given else None
