"""One answer of the cluster, put together from its wire form."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pybase64

from common.errors import InternalError
from common.routing.record import RoutingArray
from deploy.client import Json, decode_rows, join_rows
from deploy.verify.case import RowsFormat

_DICT_KEYS = ["data", "shape", "dtype", "start"]


@dataclass
class ChoiceAnswer:
    """What one choice came to."""

    token_ids: list[int] = field(default_factory=list)
    #: Entries of `logprobs.content`; None if the choice never had any.
    logprobs: list[Json] | None = None
    masks: list[list[int]] | None = None
    rows_TLK: RoutingArray | None = None
    weight_versions: list[Json] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, choice: Json, rows: "RowsReader") -> None:
        """Puts one more part of the choice behind what there is."""
        self.token_ids += choice["token_ids"]
        if choice["logprobs"] is not None:
            self.logprobs = (self.logprobs or []) + choice["logprobs"]["content"]
        if choice["sampling_mask"] is not None:
            self.masks = (self.masks or []) + choice["sampling_mask"]
        if choice["routed_experts"] is not None:
            rows_TLK = rows.read(choice["routed_experts"], self.num_rows)
            self.rows_TLK = rows_TLK if self.rows_TLK is None else join_rows([self.rows_TLK, rows_TLK])
        if choice["weight_versions"] is not None:
            self.weight_versions = choice["weight_versions"]
        self.finish_reason = choice["finish_reason"]
        self.stop_reason = choice["stop_reason"]

    @property
    def num_rows(self) -> int:
        return 0 if self.rows_TLK is None else len(self.rows_TLK)


@dataclass
class Answer:
    """`broken_rules` says where an answer was worded or cut against the documented rules, right or not."""

    #: By index.
    choices: list[ChoiceAnswer] = field(default_factory=list)
    prompt_logprobs: list[Json | None] | None = None
    prompt_token_ids: list[int] | None = None
    usage: Json = field(default_factory=dict)
    broken_rules: list[str] = field(default_factory=list)


class RowsReader:
    """Reads `routed_experts` in the form that was asked for; remembers the rules that its wording broke."""

    def __init__(self, rows_format: RowsFormat, start: int) -> None:
        """`start`: position of the answer's first row."""
        self._format = rows_format
        self._start = start
        self.broken_rules: list[str] = []

    def read(self, payload: Any, num_rows_before: int) -> RoutingArray:
        """The array of one answer or event; `num_rows_before`: rows of the same choice that came earlier.

        Raises:
            InternalError: it is no array of rows in that form.
        """
        if self._format == "npy":
            return decode_rows(payload)
        if list(payload) != _DICT_KEYS:
            self.broken_rules.append(f"routed_experts has the keys {list(payload)}, in order, not {_DICT_KEYS}")
        if payload["start"] != self._start + num_rows_before:
            rule = f"routed_experts.start is {payload['start']}, not {self._start + num_rows_before}"
            self.broken_rules.append(rule)
        return _array_of(payload["data"], payload["shape"], payload["dtype"])


def _array_of(data: str, shape: Sequence[int], dtype: str) -> RoutingArray:
    """Raises InternalError."""
    try:
        little_endian = np.dtype(dtype).newbyteorder("<")
        array = np.frombuffer(pybase64.b64decode(data, validate=True), little_endian).reshape(shape)
    except (ValueError, TypeError) as error:
        raise InternalError(f"routed_experts is no {dtype} array of shape {shape}: {error}") from error
    rows: RoutingArray = array.astype(dtype)
    return rows


def answer_of_whole(response: Json, rows: RowsReader) -> Answer:
    """Reads an answer that was not streamed."""
    answer = Answer(
        prompt_logprobs=response["prompt_logprobs"],
        prompt_token_ids=response["prompt_token_ids"],
        usage=response["usage"],
    )
    for index, wire in enumerate(response["choices"]):
        if wire["index"] != index:
            answer.broken_rules.append(f"choice {index} has index {wire['index']}")
        choice = ChoiceAnswer()
        choice.add(wire, rows)
        answer.choices.append(choice)
    answer.broken_rules += rows.broken_rules
    return answer
