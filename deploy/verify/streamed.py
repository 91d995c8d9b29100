"""One answer of the cluster, put together from the events of its stream, and the rules that a stream keeps."""

from deploy.client import Json
from deploy.verify.answer import Answer, ChoiceAnswer, RowsReader
from deploy.verify.case import Case, Form


class StreamedAnswer:
    """Collects the events of one stream and checks how tokens and rows were spread over them."""

    def __init__(self, case: Case, *, routing: bool) -> None:
        """`routing` is false where the cluster's routing is switched off; rows are not checked here then."""
        self._form = case.form
        self._num_prompt_rows = len(case.prompt) - case.routing_start if routing and case.wire.wants_rows else None
        self._rows = RowsReader(case.wire.rows_format, case.routing_start)
        self._num_events = 0
        self._answer = Answer(choices=[ChoiceAnswer() for _ in range(case.sampling.n)])

    def feed(self, event: Json) -> None:
        """Raises InternalError if its rows cannot be read."""
        if self._answer.usage:
            self._break("an event follows the usage event")
        self._answer.usage = event["usage"] or self._answer.usage
        self._note_prompt(event)
        if len(event["choices"]) > 1:
            self._break(f"one event has {len(event['choices'])} choices")
        for choice in event["choices"]:
            self._feed_choice(choice)
        self._num_events += 1

    def finish(self) -> Answer:
        for index, choice in enumerate(self._answer.choices):
            if choice.finish_reason is None:
                self._break(f"the stream ended without a finish reason of choice {index}")
        self._answer.broken_rules += self._rows.broken_rules
        return self._answer

    def _note_prompt(self, event: Json) -> None:
        if event["prompt_token_ids"] is not None:
            if self._num_events:
                self._break("prompt_token_ids come after the first event")
            self._answer.prompt_token_ids = event["prompt_token_ids"]

    def _feed_choice(self, wire: Json) -> None:
        index = wire["index"]
        if not 0 <= index < len(self._answer.choices):
            self._break(f"an event is of choice {index}, of {len(self._answer.choices)}")
            return
        choice = self._answer.choices[index]
        if choice.finish_reason is not None:
            self._break(f"an event of choice {index} follows the one with its finish reason")
        choice.add(wire, self._rows)
        self._check_spans(wire)
        if self._num_prompt_rows is not None:
            self._check_rows(wire, choice, self._num_prompt_rows)

    def _check_spans(self, wire: Json) -> None:
        """What is told about tokens travels with them, weight versions with the end."""
        masks, logprobs = wire["sampling_mask"], wire["logprobs"]
        for name, told in (("sampling_mask", masks), ("logprobs", logprobs and logprobs["content"])):
            if told is not None and len(told) != len(wire["token_ids"]):
                self._break(f"an event has {len(told)} entries of {name} for {len(wire['token_ids'])} tokens")
        if (wire["weight_versions"] is None) != (wire["finish_reason"] is None):
            self._break("weight versions belong on the event with the finish reason, and only there")

    def _check_rows(self, wire: Json, choice: ChoiceAnswer, num_prompt_rows: int) -> None:
        num_tokens = len(choice.token_ids)
        if self._form is Form.FINAL:
            if (wire["routed_experts"] is None) != (wire["finish_reason"] is None):
                self._break("rows of a final stream belong on its terminal event, and only there")
        elif num_tokens and choice.num_rows != num_prompt_rows + num_tokens - 1:
            self._break(f"{choice.num_rows} rows after {num_tokens} tokens of {num_prompt_rows} prompt rows")

    def _break(self, rule: str) -> None:
        self._answer.broken_rules.append(rule)
