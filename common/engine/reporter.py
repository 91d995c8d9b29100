"""Turns what was computed into the events of a request, and moves its choices on: to their next step, or out."""

from collections.abc import Iterable, Sequence

from common.engine.admission import Admission
from common.engine.grammar import GrammarMatcher
from common.engine.group import ChoiceGroup
from common.engine.objectives import Attainment
from common.engine.request import EngineEvent, Failed, Progress, PromptAdvanced, Work
from common.engine.saved import SavedRange, prompt_tail
from common.engine.scheduler import Scheduler
from common.engine.sequence import Phase, SequenceState
from common.engine.stages import StageObserver
from common.errors import MoerelayError, ServiceError
from common.kv.store import KVStore
from common.prompt_logprobs import PromptLogprobs
from common.routing.record import RoutingArray
from common.sampling import Finish, FinishReason, SampledToken, finish_after


class Reporter:
    """Collects events in `events`. Methods that raise have told nothing; whoever calls them fails the request."""

    def __init__(
        self,
        scheduler: Scheduler,
        store: KVStore,
        admission: Admission,
        eos_token_ids: frozenset[int],
        attainment: Attainment,
    ) -> None:
        self.events: list[EngineEvent] = []
        self.observer = StageObserver()
        self._scheduler = scheduler
        self._store = store
        self._admission = admission
        self._eos_token_ids = eos_token_ids
        self._attainment = attainment

    # --- progress

    def prefilled(
        self, group: ChoiceGroup, first_tokens: Sequence[SampledToken], logprobs: PromptLogprobs | None
    ) -> None:
        """Work.PREFILL: one more part of the prompt is computed; with its end come the first tokens."""
        prompt = group.prompt
        if first_tokens:
            self._scheduler.hold(prompt)
            request_id = group.request.request_id
            self.observer.prefilled(request_id, self._admission.age(request_id) - group.seated_s)
        self.events.append(
            PromptAdvanced(
                group.request.request_id,
                prompt.blocks,
                prompt.num_computed,
                tuple(first_tokens),
                logprobs,
                prompt.num_cached,
            )
        )

    def prompt_advanced(self, group: ChoiceGroup, logprobs: PromptLogprobs | None) -> None:
        """One more part of the prompt, not its end, is there: told with the first choice that was not aborted.

        Raises:
            RoutingMissingError: a position has no row.
        """
        rows_TLK, choice = self._take_rows(group.prompt), min(group.open)
        if choice:  # choice 0 was aborted; the others get their rows with their first token
            rows_TLK = None
        if logprobs is not None or (rows_TLK is not None and len(rows_TLK)):
            self.events.append(Progress(group.request.request_id, (), rows_TLK, None, choice, logprobs))

    def first_tokens(self, group: ChoiceGroup, tokens: Sequence[SampledToken], logprobs: PromptLogprobs | None) -> None:
        """The prompt is there, and the first token of every choice: tells them, and forks the choices that go on.

        Raises:
            RoutingMissingError: a position has no row.
            InvalidRequestError: a token does not follow the grammar, or the parser hit one of its limits.
        """
        group.ttft_s = self._admission.age(group.request.request_id)
        prompt, last_rows_TLK = group.prompt, self._take_rows(group.prompt)
        self._tell_prompt(group)
        matchers = [_moved_on(group.request.matcher, token) for token in tokens]
        finishes = [self._finish(group, token, 1) for token in tokens]
        going_on = [c for c in sorted(group.open) if finishes[c] is None]
        rows_TLK = self._prompt_rows(prompt) if group.open - {0} else None
        tail = self._tail(prompt) if any(going_on) else ()
        for choice in sorted(group.open):
            rows = rows_TLK if choice else last_rows_TLK
            scores = logprobs if choice == min(group.open) else None
            self.events.append(
                Progress(
                    group.request.request_id,
                    (tokens[choice],),
                    rows,
                    finishes[choice],
                    choice,
                    scores,
                    prompt.num_cached,
                )
            )
        for choice in going_on:
            sequence = self._scheduler.fork(group, choice, tail) if choice else prompt
            sequence.token_ids.append(tokens[choice].token_id)
            sequence.matcher = matchers[choice]
        group.is_forked = True
        if 0 in going_on:
            self._scheduler.start_decoding(prompt)
        if not going_on:
            self._attainment.finished(group.ttft_s, group.worst_itl_s)
        self._leave_open(group, going_on)

    def _tell_prompt(self, group: ChoiceGroup) -> None:
        """How long its prompt took, here or elsewhere."""
        tell = self.observer.handed_over if group.prompt.phase is Phase.LEASED else self.observer.prefilled
        tell(group.request.request_id, group.ttft_s - group.seated_s)

    def token(self, group: ChoiceGroup, sequence: SequenceState, token: SampledToken) -> None:
        """A choice that decodes has one more token and one more row.

        Raises:
            RoutingMissingError: the position has no row.
            InvalidRequestError: the parser of its grammar hit one of its limits.
        """
        rows_TLK = self._take_rows(sequence)
        if sequence.matcher is not None:
            sequence.matcher.accept(token.token_id)
        sequence.token_ids.append(token.token_id)
        finish = self._finish(group, token, sequence.num_generated)
        self.events.append(Progress(group.request.request_id, (token,), rows_TLK, finish, sequence.choice))
        if finish is not None:
            self._finished(group, sequence)
            self._leave_open(group, group.open - {sequence.choice})

    def _finished(self, group: ChoiceGroup, sequence: SequenceState) -> None:
        """A choice has ended by itself; with the last one it is known how the request did."""
        decode_s = self._admission.age(group.request.request_id) - group.ttft_s
        self.observer.decoded(group.request.request_id, decode_s)
        group.worst_itl_s = max(group.worst_itl_s, decode_s / (sequence.num_generated - 1))
        if group.open == {sequence.choice}:
            self._attainment.finished(group.ttft_s, group.worst_itl_s)

    def _finish(self, group: ChoiceGroup, token: SampledToken, num_generated: int) -> Finish | None:
        return finish_after(group.request.sampling, self._eos_token_ids, token.token_id, num_generated)

    # --- rows

    def _take_rows(self, sequence: SequenceState) -> RoutingArray | None:
        """Rows of the positions that were computed and not sent; None when no rows are wanted."""
        if not sequence.wants_rows:
            return None
        start, end = sequence.rows_sent, max(sequence.rows_sent, sequence.num_computed)
        sequence.rows_sent = end
        return self._rows(sequence, start, end)

    def _prompt_rows(self, prompt: SequenceState) -> RoutingArray | None:
        """All that the request wants of the prompt's rows; one array for all choices, which nobody changes."""
        start = prompt.request.routing_start
        return None if start is None else self._rows(prompt, start, prompt.num_prompt)

    def _rows(self, sequence: SequenceState, start: int, end: int) -> RoutingArray:
        return self._store.read_row_range(sequence.blocks, start, end)

    def _tail(self, prompt: SequenceState) -> tuple[SavedRange, ...]:
        return prompt_tail(self._store, prompt.blocks, prompt.num_prompt, routing=prompt.wants_rows)

    # --- ends

    def abort(self, group: ChoiceGroup, choices: Sequence[int]) -> None:
        """Ends some of the open choices with finish reason ABORT."""
        self._leave_open(group, group.open.difference(choices))
        aborted = Finish(FinishReason.ABORT)
        self.events += [Progress(group.request.request_id, (), None, aborted, choice) for choice in choices]

    def fail(self, group: ChoiceGroup, error: MoerelayError) -> None:
        """Ends the request, with all of its choices, in an error."""
        if isinstance(error, ServiceError) and group.request.work is not Work.PREFILL:
            self._attainment.failed()
        self.end(group)
        self.events.append(Failed(group.request.request_id, error))

    def end(self, group: ChoiceGroup) -> None:
        """Frees everything that the request holds; tells nothing."""
        self._store.free_blocks(self._scheduler.remove_group(group))
        self._admission.leave(group.request.request_id)

    def _leave_open(self, group: ChoiceGroup, choices: Iterable[int]) -> None:
        """Only these choices go on; what the others alone held is free, and so is the request when none is left."""
        group.open = set(choices)
        if not group.open:
            self.end(group)
        elif group.is_forked:
            for sequence in [s for c, s in group.sequences.items() if c not in group.open]:
                self._store.free_blocks(self._scheduler.remove(sequence))


def _moved_on(matcher: GrammarMatcher | None, token: SampledToken) -> GrammarMatcher | None:
    """A fork of the grammar at its beginning, after the first token."""
    if matcher is None:
        return None
    fork = matcher.fork()
    fork.accept(token.token_id)
    return fork
