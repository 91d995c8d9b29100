"""One streamed answer as it comes: its times, and whether it is whole and keeps the rules. Sans-I/O."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from common.errors import InternalError
from deploy.client import decode_rows
from deploy.load.contract import BrokenContractError, RowRules
from deploy.sse import SseDecoder

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the load."""

    token_ids: tuple[int, ...]
    max_tokens: int

    def body(self) -> Json:
        """Of POST /inference/v1/generate: a stream of exactly `max_tokens` tokens with all rows."""
        return {
            "token_ids": list(self.token_ids),
            "sampling_params": {"max_tokens": self.max_tokens, "ignore_eos": True, "temperature": 0},
            "stream": True,
            "stream_options": {"include_usage": True, "routed_experts": "delta"},
        }


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens that came together: how many, and how long after those before, or after the request for the first."""

    num_tokens: int
    after_s: float
    is_first: bool


class BrokenStreamError(Exception):
    """The stream ended in an error, or not at all."""


@dataclass
class StreamCheck:
    """Is fed the bytes of one answer. `rows` is None where routing is switched off."""

    ask: Ask
    rows: RowRules | None
    started_s: float
    num_tokens: int = 0
    num_rows: int = 0
    _finish: str | None = None
    #: Of tokens, as the usage says.
    _counted: int | None = None
    _is_done: bool = False
    _last_s: float | None = None
    _decoder: SseDecoder = field(default_factory=SseDecoder)

    def feed(self, data: bytes, now_s: float) -> Iterator[Arrival]:
        """Reads what came at `now_s`.

        Raises:
            BrokenContractError: an event breaks a rule.
            BrokenStreamError: the stream says that it failed.
        """
        try:
            payloads = list(self._decoder.feed(data))
        except UnicodeDecodeError as error:
            raise BrokenContractError(f"an event is not UTF-8: {error}") from error
        for payload in payloads:
            if self._is_done:
                raise BrokenContractError("an event after [DONE]")
            if payload == "[DONE]":
                self._is_done = True
                continue
            yield from self._event(payload, now_s)

    def _event(self, payload: str, now_s: float) -> Iterator[Arrival]:
        try:
            event: Json = json.loads(payload)
            if "error" in event:
                raise BrokenStreamError(f"{event['error']['type']}: {event['error']['message']}")
            if usage := event.get("usage"):
                self._counted = usage["completion_tokens"]
            for choice in event["choices"]:
                num_new = len(choice["token_ids"])
                self._read(choice, num_new)
                if num_new:
                    since = self.started_s if self._last_s is None else self._last_s
                    yield Arrival(num_new, now_s - since, self._last_s is None)
                    self._last_s = now_s
        except (KeyError, TypeError, ValueError, AttributeError, InternalError) as error:
            raise BrokenContractError(f"an event has not the documented form: {error!r}") from error

    def _read(self, choice: Json, num_new: int) -> None:
        if self._finish is not None:
            raise BrokenContractError("an event after the finish reason")
        self.num_tokens += num_new
        self._finish = choice["finish_reason"]
        if choice["routed_experts"] is not None:
            if self.rows is None:
                raise BrokenContractError("rows, although routing is switched off")
            rows_TLK = decode_rows(choice["routed_experts"])
            self.rows.check(rows_TLK)
            self.num_rows += len(rows_TLK)
        if self.num_tokens and self.rows is not None:
            expected = len(self.ask.token_ids) + self.num_tokens - 1
            if self.num_rows != expected:
                raise BrokenContractError(f"{self.num_rows} rows instead of {expected} with {self.num_tokens} tokens")

    def finish(self) -> None:
        """No more bytes will come.

        Raises:
            BrokenStreamError: the answer is not whole.
            BrokenContractError: it is not what was asked for.
        """
        if not self._is_done or not self._decoder.is_empty:
            raise BrokenStreamError(f"the stream ended without [DONE] after {self.num_tokens} tokens")
        if self._finish is None:
            raise BrokenStreamError("[DONE] without a finish reason")
        if self._finish != "length" or self.num_tokens != self.ask.max_tokens:
            raise BrokenContractError(
                f"{self.num_tokens} tokens and {self._finish!r} where {self.ask.max_tokens} and 'length' were asked for"
            )
        if self._counted != self.num_tokens:
            raise BrokenContractError(f"usage counts {self._counted} of {self.num_tokens} tokens")
