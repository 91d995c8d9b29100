"""Runs the prompts of a request on workers that can be reached, and ends them early. All dialects run on this."""

import asyncio
import time
from collections.abc import Sequence

import structlog

from common.errors import MoerelayError, NotTakenError, UnavailableError
from common.pb import worker_pb2
from common.tracing import current_span
from router.attempts import Attempts
from router.calls import all_tried, task_group
from router.chunk import aborted
from router.dependence import Dependence
from router.fleet import Fleet, Pair
from router.live import LivePrompt, LiveRequest
from router.placement.subject import Subject
from router.plan import Plan
from router.prompt_run import PromptRun
from router.sink import Observer, Sink

#: An abort may overtake the request it is for by the time a worker needs to take the request in.
ABORT_RETRY_S = 0.1

log = structlog.get_logger()


class Pipeline:
    """Runs prompts on the fleet. Whoever cancels a run (a client that left) cancels both calls."""

    def __init__(self, fleet: Fleet, *, connect_timeout_s: float, max_attempts: int) -> None:
        self._fleet = fleet
        self._timeout_s = connect_timeout_s
        self._max_attempts = max_attempts

    async def run(self, plans: Sequence[Plan], sink: Sink, live: LiveRequest, observer: Observer) -> None:
        """Runs all prompts of a request at the same time; the first that fails ends the others.

        Raises:
            MoerelayError: whatever a worker or the fleet reports.
        """
        async with task_group() as group:
            for plan in plans:
                group.create_task(self._trace_prompt(plan, live, sink, observer))

    async def abort(self, live: LiveRequest, choice: tuple[int, int] | None = None) -> None:
        """Tells the workers to end a request with finish reason "abort"; prompts not yet opened end at once.

        `choice`: (index of its prompt, index there) of the only one that is to end.
        """
        if choice is None:
            live.aborted = True
        else:
            live.aborted_choices.add(choice)
        prompts = list(live.prompts.values())
        if choice is None:
            await all_tried(self._abort_prompt(prompt, live) for prompt in prompts)
        else:
            await all_tried(self._abort_choice(p, live, choice[1]) for p in prompts if p.index == choice[0])

    async def _trace_prompt(self, plan: Plan, live: LiveRequest, sink: Sink, observer: Observer) -> None:
        with current_span().child("router.prompt", index=plan.index, prompt_tokens=plan.prompt_len):
            await self._run_prompt(plan, live, sink, observer)

    async def _run_prompt(self, plan: Plan, live: LiveRequest, sink: Sink, observer: Observer) -> None:
        """Offers the prompt to one pair after the other, as long as none of them has done anything for it."""
        attempts = Attempts(self._max_attempts)
        subject = self._fleet.subject(plan.token_ids, salt=plan.cache_salt, session=live.session)
        taken = False
        while not taken:
            with Dependence(num_choices=plan.sampling.n) as dependence:
                began = time.monotonic()
                with current_span().child("router.place"):
                    async with live.failure.guarding():
                        pair = await self._connected_pair(subject, attempts, dependence)
                observer.placed(time.monotonic() - began)
                if live.aborted:
                    for choice in range(plan.sampling.n):
                        await sink.take(plan, aborted(choice))
                    return
                if pair.fallback:
                    observer.fell_back()
                    log.debug("fell_back", request_id=plan.request_id, worker=pair.decode.id)
                named = attempts.renamed(plan)
                prompt = LivePrompt(named.request_id, pair, plan.index)
                run = PromptRun(named, live, prompt, dependence, sink, observer, timeout_s=self._timeout_s)
                taken = await self._offer(run, prompt, live, attempts)

    async def _offer(self, run: PromptRun, prompt: LivePrompt, live: LiveRequest, attempts: Attempts) -> bool:
        """Runs the prompt there; False if one of the two would not take it and another pair may."""
        try:
            async with task_group() as group:
                with live.serving(prompt):
                    for index, choice in live.aborted_choices:
                        if index == prompt.index:
                            group.create_task(self._abort_choice_late(prompt, live, choice))
                    await run.run()
        except NotTakenError as error:
            if run.refused_by is None:
                raise
            await attempts.failed(run.refused_by, error)
            return False
        return True

    async def _connected_pair(self, subject: Subject, attempts: Attempts, dependence: Dependence) -> Pair:
        """Workers that can be reached. One that cannot is suspect from now on, and nothing was sent to it."""
        while True:
            try:
                pair = self._fleet.pick(subject, attempts.tried)
            except UnavailableError as nobody:
                raise attempts.error or nobody from None
            dependence.on(pair.workers)
            try:
                for worker in pair.workers:
                    await worker.connect(self._timeout_s)
            except UnavailableError as error:
                dependence.release(pair.workers)
                # Where decode workers may do without, trying prefill workers costs the prompt no attempt.
                free = worker is pair.prefill and self._fleet.allows_fallback
                await attempts.failed(worker, error, free=free)
            else:
                return pair

    async def _abort_prompt(self, prompt: LivePrompt, live: LiveRequest) -> None:
        """Decode first: it then drops the handoff itself, instead of reporting a broken one."""
        message = worker_pb2.AbortRequest(request_id=prompt.request_id)
        await self._tell_decode(prompt, live, message)
        try:
            if prompt.pair.prefill:
                await prompt.pair.prefill.abort(message, self._timeout_s)
        except MoerelayError as error:
            # It may have left long after its handoff; decode has dropped what it could still send.
            log.info("prefill_not_told", request_id=prompt.request_id, error=error.message)

    async def _abort_choice(self, prompt: LivePrompt, live: LiveRequest, choice: int) -> None:
        """The prompt's other choices go on, so that prefill need not know."""
        message = worker_pb2.AbortRequest(request_id=prompt.request_id, choice=choice)
        await self._tell_decode(prompt, live, message)

    async def _abort_choice_late(self, prompt: LivePrompt, live: LiveRequest, choice: int) -> None:
        """Of a choice that was aborted before its prompt was placed: nobody waits for the outcome."""
        try:
            await self._abort_choice(prompt, live, choice)
        except MoerelayError as error:
            log.warning("choice_not_aborted", request_id=prompt.request_id, choice=choice, error=error.message)

    async def _tell_decode(self, prompt: LivePrompt, live: LiveRequest, message: worker_pb2.AbortRequest) -> None:
        """Until it has heard of the request that is to end, or the request has ended anyway."""
        while True:
            begun = prompt.begun
            found = await prompt.pair.decode.abort(message, self._timeout_s)
            if found or begun or prompt.request_id not in live.prompts:
                return
            await asyncio.sleep(ABORT_RETRY_S)
