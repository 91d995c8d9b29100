"""Load test of a running cluster: `locust -f deploy/locustfile.py --headless -u 30 -t 60s --host URL`.

Every stream is read to its end, every gap timed, and every answer held to the rules of its rows. Needs the extra
`load`.
"""

import itertools
import logging
import random
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import gevent
from gevent.pool import Group
from locust import User, events, task
from locust.env import Environment
from locust.rpc import Message
from locust.runners import LocalRunner, MasterRunner

from common.errors import MoerelayError
from deploy.advise.command import rate
from deploy.arguments import first_key, integer
from deploy.load.prompts import LengthRange, RandomAsks
from deploy.load.request import run
from deploy.load.stream import Arrival, Ask
from deploy.load.tally import Tally
from deploy.load.target import Facts, Target
from deploy.load.trace import TracedAsk, asks, read_trace

log = logging.getLogger(__name__)

#: Streams that are under way when the test ends get so long to come to their end, unless --stop-timeout says more.
STOP_TIMEOUT_S = 60.0

#: After their last stream other processes get so long to report and to end.
_REPORT_S = 10.0

#: Between two looks at whether all requests of a trace have ended.
_POLL_S = 0.1


@dataclass
class Test:
    """What all users of one process share while a test runs."""

    target: Target
    facts: Facts
    rng: random.Random
    wants_rows: bool
    prompts: RandomAsks
    trace: Iterator[TracedAsk] | None
    #: Arrivals per second of each user; None: one request after the other.
    rate_per_user: float | None
    started_s: float


tally = Tally()
_test: Test | None = None
_seconds = 0.0


def length_range(text: str) -> str:
    """Text that LengthRange reads; left as it is, because a master sends its options to other processes."""
    LengthRange.parse(text)
    return text


def add_options(parser: ArgumentParser, **_: Any) -> None:
    """Beside locust's own. Values are text and numbers, which a master can send to other processes."""
    group = parser.add_argument_group("moerelay")
    add = group.add_argument
    add("--prompt-tokens", type=length_range, default="32:256", help="length of prompts: N or LOW:HIGH")
    add("--output-tokens", type=length_range, default="16:64", help="tokens to generate: N or LOW:HIGH")
    add("--arrival-rate", type=rate, help="requests per second at random times (open loop), instead of one per user")
    add("--trace", help="replay a trace in Mooncake's JSONL format")
    add("--trace-speed", type=rate, default=1.0, help="so many times as fast as recorded")
    add("--trace-requests", type=integer(1), help="only the first so many of the trace")
    add("--model", help="the served checkpoint, for its vocabulary and experts; default: found if it is here")
    add("--vocab-size", type=integer(1), help="ids of prompts are below; default: the checkpoint's, else 256")
    add("--no-rows", action="store_true", help="ask for no routing rows")
    add("--api-key-file", help="file with the router's API keys; the first one is sent")
    add("--load-seed", type=int, help="makes the prompts repeatable")


def let_streams_end(environment: Environment, **_: Any) -> None:
    """What the end of the test cut off would be no answer to judge."""
    if not environment.stop_timeout:
        environment.stop_timeout = STOP_TIMEOUT_S


def begin(environment: Environment, **_: Any) -> None:
    """Learns what is served; a test that cannot begin ends with exit code 2."""
    global _test
    if isinstance(environment.runner, MasterRunner):
        return
    try:
        _test = _prepared(environment)
    except MoerelayError as error:
        log.error("load: %s", error.message)
        environment.process_exit_code = 2
        assert environment.runner is not None
        # Not at once: locust is starting the test, and would go on with that.
        gevent.spawn(environment.runner.quit)


def _prepared(environment: Environment) -> Test:
    """Raises MoerelayError."""
    options: Any = environment.parsed_options
    host = (environment.host or StreamUser.host or "").rstrip("/")
    target = Target(host, first_key(_path(options.api_key_file)))
    facts = Facts.read(target, _path(options.model), options.vocab_size)
    lengths = LengthRange.parse(options.prompt_tokens), LengthRange.parse(options.output_tokens)
    prompts = RandomAsks(*lengths, facts.vocab_size)
    trace = None
    if options.trace is None:
        facts.require_room(prompts.prompt.high + prompts.output.high)
    else:
        lines = read_trace(Path(options.trace), options.trace_requests)
        every = asks(lines, facts.vocab_size, facts.max_model_len, options.trace_speed)
        trace = _share_of(environment, every)
    per_user = options.arrival_rate / max(1, options.num_users or 1) if options.arrival_rate else None
    rng = random.Random() if options.load_seed is None else random.Random(f"{options.load_seed}/{_place(environment)}")
    return Test(target, facts, rng, not options.no_rows, prompts, trace, per_user, time.perf_counter())


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _place(environment: Environment) -> int:
    """Number of this process among those that send."""
    return max(0, getattr(environment.runner, "worker_index", 0))


def _share_of(environment: Environment, trace: Iterator[TracedAsk]) -> Iterator[TracedAsk]:
    """Of several processes each replays its part of a trace."""
    if isinstance(environment.runner, LocalRunner):
        return trace
    options: Any = environment.parsed_options
    return islice(trace, _place(environment), None, max(1, options.expect_workers))


def end(environment: Environment, **_: Any) -> None:
    """Remembers how long it took; a master that has no web page ends the others."""
    global _seconds
    options: Any = environment.parsed_options
    if _test is not None:
        _seconds = time.perf_counter() - _test.started_s
    elif isinstance(environment.runner, MasterRunner) and options.headless:
        _gather(environment.runner, (environment.stop_timeout or 0) + _REPORT_S)


def _gather(runner: MasterRunner, timeout_s: float) -> None:
    """Until all others have told their last: locust waits half a second for it, and streams take longer to end."""
    for client in runner.clients.all:
        runner.server.send_to_client(Message("quit", None, client.id))
    with gevent.Timeout(timeout_s, False):
        while runner.clients.all:
            gevent.sleep(_POLL_S)


def report(client_id: str, data: dict[str, Any], **_: Any) -> None:
    """A process that sends tells the one that sums up."""
    global tally
    data["moerelay"] = {"tally": tally.told(), "seconds": time.perf_counter() - _test.started_s if _test else 0.0}
    tally = Tally()


def add_report(client_id: str, data: dict[str, Any], **_: Any) -> None:
    """The other end of `report`."""
    global _seconds
    if told := data.get("moerelay"):
        tally.merge(told["tally"])
        _seconds = max(_seconds, told["seconds"])


def sum_up(environment: Environment, **_: Any) -> None:
    """Prints the summary and chooses the exit code."""
    if environment.process_exit_code is None and isinstance(environment.runner, LocalRunner | MasterRunner):
        print(*tally.summary(_seconds), sep="\n", flush=True)
        environment.process_exit_code = tally.exit_code


events.init_command_line_parser.add_listener(add_options)
events.init.add_listener(let_streams_end)
events.test_start.add_listener(begin)
events.test_stop.add_listener(end)
events.report_to_master.add_listener(report)
events.worker_report.add_listener(add_report)
events.quitting.add_listener(sum_up)


class StreamUser(User):
    """Sends requests and reads their streams to the end."""

    host = "http://127.0.0.1:8000"

    def on_start(self) -> None:
        self.streams = Group()

    @task
    def next(self) -> None:
        """One request after the other, or at its time whatever became of those before."""
        test = _test
        if test is None:
            gevent.sleep(_POLL_S)  # it could not begin, and is being ended
        elif test.trace is not None:
            self._replay(test, test.trace)
        elif test.rate_per_user is not None:
            gevent.sleep(test.rng.expovariate(test.rate_per_user))
            self.streams.spawn(self._request, test, test.prompts.draw(test.rng))
        else:
            self._request(test, test.prompts.draw(test.rng))

    def _replay(self, test: Test, trace: Iterator[TracedAsk]) -> None:
        """The next request that no other user has taken."""
        traced = next(trace, None)
        if traced is None:
            self._end_of_trace()
            return
        tally.num_shortened += traced.is_cut
        gevent.sleep(max(0.0, test.started_s + traced.at_s - time.perf_counter()))
        self.streams.spawn(self._request, test, traced.ask)

    def _end_of_trace(self) -> None:
        """Waits for what is under way; the last user of a process that sends alone ends the test."""
        self.streams.join()
        runner = self.environment.runner
        if isinstance(runner, LocalRunner) and not next(_ending, 0):
            gevent.spawn_later(0, _end_test, self.environment)
        gevent.sleep(_POLL_S)

    def on_stop(self) -> None:
        """Streams that are under way come to their end, or are cut off when the time for that is over."""
        try:
            self.streams.join()
        finally:
            self.streams.kill()

    def _request(self, test: Test, ask: Ask) -> None:
        started = time.perf_counter()
        try:
            run(test.target, ask, test.facts.rows if test.wants_rows else None, self._arrived)
        except gevent.GreenletExit:
            tally.num_cut_off += 1
            raise
        except Exception as error:  # noqa: BLE001  # what ends a greenlet here would be counted nowhere
            tally.failed(f"{type(error).__name__}: {error}")
            self._fire("E2E", time.perf_counter() - started, error)
        else:
            seconds = time.perf_counter() - started
            tally.finished(len(ask.token_ids), seconds)
            self._fire("E2E", seconds)

    def _arrived(self, arrival: Arrival) -> None:
        tally.arrived(arrival)
        if arrival.is_first:
            self._fire("TTFT", arrival.after_s)
        else:
            self._fire("ITL", arrival.after_s / arrival.num_tokens)

    def _fire(self, name: str, seconds: float, error: BaseException | None = None) -> None:
        """As locust counts: milliseconds."""
        self.environment.events.request.fire(
            request_type="stream",
            name=name,
            response_time=1000 * seconds,
            response_length=0,
            exception=error,
            context={},
        )


#: The first user that asks gets a 0.
_ending = itertools.count()


def _end_test(environment: Environment) -> None:
    """When the streams of all users have ended."""
    runner = environment.runner
    assert runner is not None
    while any(greenlet.args[0].streams for greenlet in runner.user_greenlets if greenlet.args):
        gevent.sleep(_POLL_S)
    runner.quit()
