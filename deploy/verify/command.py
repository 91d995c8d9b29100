"""`moerelay verify`: random requests to a running cluster, every answer compared bitwise with a solo run of our own.

Requests are sent `concurrency` at a time; meanwhile another thread computes the solo runs of those that have ended.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from common.config import LogSettings, load_settings
from common.errors import InternalError, MoerelayError
from common.log import configure_logging
from deploy.client import ClusterClient, Json
from deploy.extras import needs_worker_extra
from deploy.verify.answer import Answer, StreamedAnswer, answer_of_whole
from deploy.verify.cases import Case, Form, make_case
from deploy.verify.options import VerifyOptions, parse_options

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
        async with ClusterClient(options.url, max_connections=options.concurrency) as client:
            models, cluster = await client.get("/v1/models"), await client.get("/cluster")
            load = partial(_load_judge, options, models, cluster, routing=await returns_rows(client))
            judge = await asyncio.get_running_loop().run_in_executor(executor, load)
            with _progress_bar(options.requests) as advance:
                await ask_and_judge(options, client, judge, executor, advance)
    if options.dump is not None:
        judge.write_dump(options.dump)
    for line in judge.report():
        print(line)
    return 1 if judge.findings.total else 0


async def returns_rows(client: ClusterClient) -> bool:
    """Whether routing is switched on in the cluster: asks for one token. Raises MoerelayError."""
    response = await client.generate({"token_ids": [0], "sampling_params": {"max_tokens": 1, "temperature": 0}})
    return answer_of_whole(response).rows_TLK is not None


def _load_judge(options: VerifyOptions, models: Json, cluster: Json, *, routing: bool) -> "Judge":
    with needs_worker_extra("verify"):
        from deploy.verify.judge import load_judge
    return load_judge(options, models, cluster, routing=routing)


@contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, if that is a terminal; yields what moves it on by one."""
    console = Console(stderr=True)
    columns = (TextColumn("verify"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("verify", total=total)
        yield lambda: progress.advance(task)


async def ask_and_judge(
    options: VerifyOptions,
    client: ClusterClient,
    judge: "Judge",
    executor: ThreadPoolExecutor,
    advance: Callable[[], None],
) -> None:
    """Asks without waiting for the judge, so that the cluster always has `concurrency` requests.

    Raises:
        MoerelayError: a solo run failed, so that nothing can be compared.
    """
    cases = (make_case(options.seed, index, judge.limits) for index in range(options.requests))
    ended: asyncio.Queue[tuple[Case, Outcome]] = asyncio.Queue()

    async def ask_next() -> None:
        for case in cases:
            await ended.put((case, await ask(client, case, routing=judge.routing)))

    with _without_group():
        async with asyncio.TaskGroup() as group:
            for _ in range(options.concurrency):
                group.create_task(ask_next())
            for _ in range(options.requests):
                case, outcome = await ended.get()
                await asyncio.get_running_loop().run_in_executor(executor, judge.add, case, outcome)
                advance()


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


async def ask(client: ClusterClient, case: Case, *, routing: bool) -> Outcome:
    """The answer to one request, or why there is none; `routing`: it must come with rows."""
    try:
        if case.form is Form.WHOLE:
            return answer_of_whole(await client.generate(case.body()))
        streamed = StreamedAnswer(case.form, len(case.prompt) - case.routing_start if routing else None)
        async for event in client.stream(case.body()):
            streamed.feed(event)
        return streamed.finish()
    except MoerelayError as error:
        return error
    except (KeyError, IndexError, TypeError) as error:
        return InternalError(f"the answer has not the documented form: {error!r}")
