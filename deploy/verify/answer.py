"""One answer of the cluster, put together from its wire form, streamed or not."""

from dataclasses import dataclass, field

from common.routing.record import RoutingArray
from deploy.client import Json, decode_rows, join_rows
from deploy.verify.cases import Form


@dataclass
class Answer:
    """`broken_rules` says where a stream was cut against the documented rules, although its content may be right."""

    token_ids: list[int] = field(default_factory=list)
    #: Entries of `logprobs.content`; None if the answer never had any.
    logprobs: list[Json] | None = None
    rows_TLK: RoutingArray | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    usage: Json = field(default_factory=dict)
    broken_rules: list[str] = field(default_factory=list)


def answer_of_whole(response: Json) -> Answer:
    """Reads an answer that was not streamed."""
    answer = Answer(usage=response["usage"])
    _add_choice(answer, response["choices"][0])
    return answer


class StreamedAnswer:
    """Collects the events of one stream and checks how tokens and rows were spread over them.

    `num_prompt_rows` is None where routing is switched off; rows are not checked here then.
    """

    def __init__(self, form: Form, num_prompt_rows: int | None) -> None:
        self._form = form
        self._num_prompt_rows = num_prompt_rows
        self._answer = Answer()

    def feed(self, event: Json) -> None:
        if self._answer.usage:
            self._break("an event follows the usage event")
        self._answer.usage = event["usage"] or self._answer.usage
        for choice in event["choices"]:
            if self._answer.finish_reason is not None:
                self._break("an event follows the one with the finish reason")
            _add_choice(self._answer, choice)
            self._check_rows(choice)

    def finish(self) -> Answer:
        if self._answer.finish_reason is None:
            self._break("the stream ended without a finish reason")
        return self._answer

    def _check_rows(self, choice: Json) -> None:
        num_tokens = len(self._answer.token_ids)
        num_rows = 0 if self._answer.rows_TLK is None else len(self._answer.rows_TLK)
        if self._num_prompt_rows is None:
            return
        if self._form is Form.FINAL:
            if (choice["routed_experts"] is None) != (choice["finish_reason"] is None):
                self._break("rows of a final stream belong on its terminal event, and only there")
        elif num_tokens and num_rows != self._num_prompt_rows + num_tokens - 1:
            self._break(f"{num_rows} rows after {num_tokens} tokens of {self._num_prompt_rows} prompt rows")

    def _break(self, rule: str) -> None:
        self._answer.broken_rules.append(rule)


def _add_choice(answer: Answer, choice: Json) -> None:
    answer.token_ids += choice["token_ids"]
    if choice["logprobs"] is not None:
        answer.logprobs = (answer.logprobs or []) + choice["logprobs"]["content"]
    if choice["routed_experts"] is not None:
        rows_TLK = decode_rows(choice["routed_experts"])
        answer.rows_TLK = rows_TLK if answer.rows_TLK is None else join_rows([answer.rows_TLK, rows_TLK])
    answer.finish_reason = choice["finish_reason"]
    answer.stop_reason = choice["stop_reason"]
