"""One request of `moerelay verify`: what is asked, and how the answer is to travel."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from common.routing.record import RoutingArray
from common.sampling import SamplingParams
from deploy.verify.grammars import GRAMMARS

RowsFormat = Literal["npy", "dict"]


class Form(StrEnum):
    """How the answer is asked for; the bytes must not depend on it."""

    WHOLE = "whole"
    DELTA = "delta"
    FINAL = "final"


@dataclass(frozen=True, slots=True)
class CaseLimits:
    """What requests may look like; lengths are upper bounds."""

    vocab_size: int
    max_model_len: int
    max_prompt: int
    max_output: int
    eos_token_ids: frozenset[int]
    #: Ids whose text is printable ASCII, with that text: what stop strings and bad words are made of. Without a
    #: tokenizer there are none.
    pieces: tuple[tuple[int, str], ...] = ()
    #: Names of the grammars that the checkpoint's tokenizer can follow.
    grammars: tuple[str, ...] = ()
    #: The cluster tells logprobs of the distribution sampled from.
    processed_logprobs: bool = False

    @property
    def max_positions(self) -> int:
        """The longest sequence that a case may have, the second turn of a conversation included."""
        return min(self.max_model_len, self.max_prompt + 2 * self.max_output + MAX_USER_TURN)


#: Most tokens that are put between the turns of a conversation.
MAX_USER_TURN = 8


@dataclass(frozen=True, slots=True)
class TextRules:
    """What the request says in text; workers and solo runs know these as ids and grammars, or not at all."""

    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    bad_words: tuple[str, ...] = ()
    #: A name in `GRAMMARS`.
    grammar: str | None = None


@dataclass(frozen=True, slots=True)
class Wire:
    """What must not change the answer's content, only how it is served and worded."""

    rows_format: RowsFormat = "npy"
    wants_rows: bool = True
    return_token_ids: bool = False
    max_event_bytes: int | None = None
    cache_salt: str | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class FirstTurn:
    """The rows that the answer before this one in a conversation came with, from position `start` on."""

    start: int
    rows_TLK: RoutingArray


@dataclass(frozen=True, slots=True)
class Case:
    """One request. `sampling.max_tokens` is clamped to the context already; `asked_max_tokens` is what is sent.

    `sampling` has neither bad words nor a grammar: those are in `text`.
    """

    index: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    asked_max_tokens: int
    routing_start: int
    form: Form
    text: TextRules = TextRules()
    wire: Wire = Wire()
    first_turn: FirstTurn | None = field(default=None, compare=False)

    @property
    def rows_from(self) -> int:
        """The first position whose row is looked at: a conversation is judged as a whole."""
        return self.routing_start if self.first_turn is None else self.first_turn.start

    def body(self) -> dict[str, Any]:
        """The JSON body of POST /inference/v1/generate. Every field is explicit: no default of the server counts."""
        body: dict[str, Any] = {
            "token_ids": list(self.prompt),
            "sampling_params": self._sampling_fields(),
            "return_token_ids": self.wire.return_token_ids,
            "cache_salt": self.wire.cache_salt,
            "priority": self.wire.priority,
        }
        if self.form is not Form.WHOLE:
            options = {
                "include_usage": True,
                "routed_experts": self.form.value,
                "max_event_bytes": self.wire.max_event_bytes,
            }
            body |= {"stream": True, "stream_options": options}
        return body

    def _sampling_fields(self) -> dict[str, Any]:
        s, text = self.sampling, self.text
        return {
            "n": s.n,
            "max_tokens": self.asked_max_tokens,
            "min_tokens": s.min_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k,
            "min_p": s.min_p,
            "seed": s.seed,
            "presence_penalty": s.presence_penalty,
            "frequency_penalty": s.frequency_penalty,
            "repetition_penalty": s.repetition_penalty,
            "logit_bias": {str(token_id): bias for token_id, bias in s.logit_bias.items()},
            "allowed_token_ids": sorted(s.allowed_token_ids) or None,
            "bad_words": list(text.bad_words) or None,
            "stop": list(text.stop) or None,
            "skip_special_tokens": text.skip_special_tokens,
            "stop_token_ids": sorted(s.stop_token_ids),
            "ignore_eos": s.ignore_eos,
            "logprobs": s.logprobs,
            "prompt_logprobs": s.prompt_logprobs,
            "structured_outputs": None if text.grammar is None else dict(GRAMMARS[text.grammar].asked),
            "return_sampling_mask": s.sampling_mask,
            "return_routed_experts": self.wire.wants_rows,
            "routed_experts_prompt_start": self.routing_start,
            "routed_experts_format": self.wire.rows_format,
        }
