"""`moerelay verify`: random requests to a running cluster, every answer compared bitwise with a solo run of our own.

Requests are sent `concurrency` at a time; meanwhile another thread computes the solo runs of those that have ended.
"""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from common.config import LogSettings
from common.errors import InternalError, MoerelayError
from common.log import configure_logging
from common.progress import Advance, progress_bar
from common.settings_loader import load_settings
from deploy.client import ClusterClient, Json
from deploy.extras import needs_worker_extra
from deploy.verify.answer import Answer, RowsReader, answer_of_whole
from deploy.verify.case import Case, CaseLimits, Form
from deploy.verify.cases import continued, conversations
from deploy.verify.options import VerifyOptions, parse_options
from deploy.verify.options import command_line as command_line
from deploy.verify.pressure import Pressure
from deploy.verify.streamed import StreamedAnswer
from deploy.verify.switches import Switches, find_switches

if TYPE_CHECKING:
    from deploy.verify.judge import Judge

Outcome = Answer | MoerelayError


def main(argv: Sequence[str]) -> int:
    options = parse_options(argv)
    configure_logging(load_settings(LogSettings, [], prog="moerelay verify"), process="verify")
    return asyncio.run(verify(options))


async def verify(options: VerifyOptions) -> int:
    """Runs all requests and prints what differs; returns the exit code.

    Raises:
        ConfigError: this process cannot compute what the cluster computes.
        MoerelayError: the cluster cannot be asked about itself.
    """
    # One thread computes everything: torch keeps its number of threads per calling thread.
    with ThreadPoolExecutor(max_workers=1) as executor:
        async with ClusterClient(options.url, options.concurrency, api_key=options.api_key) as client:
            models, cluster = await client.get("/v1/models"), await client.get("/cluster")
            load = partial(_load_judge, options, models, cluster, await find_switches(client))
            judge = await asyncio.get_running_loop().run_in_executor(executor, load)
            before = await Pressure.read(client)
            with progress_bar("verify", options.requests) as advance:
                await ask_and_judge(options, client, judge, executor, advance)
            pressure = (await Pressure.read(client)).since(before)
    if options.dump is not None:
        judge.write_dump(options.dump)
    *findings, summary = judge.report()
    print(*findings, pressure, summary, sep="\n")
    return 1 if judge.findings.total else 0


def _load_judge(options: VerifyOptions, models: Json, cluster: Json, switches: Switches) -> "Judge":
    with needs_worker_extra("verify"):
        from deploy.verify.judge import load_judge
    return load_judge(options, models, cluster, switches)


async def ask_and_judge(
    options: VerifyOptions,
    client: ClusterClient,
    judge: "Judge",
    executor: ThreadPoolExecutor,
    advance: Advance,
) -> None:
    """Asks without waiting for the judge, so that the cluster always has `concurrency` requests.

    Raises:
        MoerelayError: a solo run failed, so that nothing can be compared.
    """
    waiting = conversations(options.seed, options.requests, judge.limits)
    ended: asyncio.Queue[tuple[Case, Outcome]] = asyncio.Queue()

    async def ask_next() -> None:
        for first, *later in waiting:
            outcome = await ask(client, first, routing=judge.routing)
            await ended.put((first, outcome))
            for case in later:
                turn = _next_turn(options.seed, first, outcome, case, judge.limits)
                await ended.put((turn, await ask(client, turn, routing=judge.routing)))

    with _without_group():
        async with asyncio.TaskGroup() as group:
            for _ in range(options.concurrency):
                group.create_task(ask_next())
            for _ in range(options.requests):
                case, outcome = await ended.get()
                await asyncio.get_running_loop().run_in_executor(executor, judge.add, case, outcome)
                advance(1)


@contextmanager
def _without_group() -> Iterator[None]:
    """Takes a lone MoerelayError out of the group in which a TaskGroup puts everything."""
    try:
        yield
    except ExceptionGroup as group:
        match group.exceptions:
            case (MoerelayError() as error,):
                raise error from error.__cause__
            case _:
                raise


def _next_turn(seed: int, first: Case, outcome: Outcome, case: Case, limits: CaseLimits) -> Case:
    """`case` as what follows the first case's last choice; by itself where that one has no answer."""
    if isinstance(outcome, MoerelayError) or not outcome.choices or not outcome.choices[-1].token_ids:
        return case
    choice = outcome.choices[-1]
    return continued(case, seed, first, choice.token_ids, choice.rows_TLK, limits)


async def ask(client: ClusterClient, case: Case, *, routing: bool) -> Outcome:
    """The answer to one request, or why there is none; `routing`: it must come with rows."""
    try:
        if case.form is Form.WHOLE:
            rows = RowsReader(case.wire.rows_format, case.routing_start)
            return answer_of_whole(await client.generate(case.body()), rows)
        streamed = StreamedAnswer(case, routing=routing)
        async for event in client.stream(case.body()):
            streamed.feed(event)
        return streamed.finish()
    except MoerelayError as error:
        return error
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        return InternalError(f"the answer has not the documented form: {error!r}")
