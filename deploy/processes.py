"""Child processes of the launcher: start, watch, pass their stderr on, stop. Nothing here knows what they do."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from common.config import ENV_PREFIX
from deploy.child import LATE

T = TypeVar("T")

#: Longest piece of a child's line that is forwarded in one go.
_MAX_LINE_BYTES = 64 * 2**10
#: How long a dead child's stderr is still read: a grandchild may hold the pipe open.
_STDERR_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run: `python -m module arguments…`."""

    name: str
    module: str
    arguments: tuple[str, ...]
    #: What to import meanwhile, of a process that gets its arguments from `Child.send_arguments` instead.
    imported: str | None = None


class Child:
    """One running process; `exit_code` is None while it lives."""

    def __init__(self, spec: ProcessSpec, process: asyncio.subprocess.Process) -> None:
        self.name = spec.name
        self._process = process
        self._last_line = b""

    @classmethod
    async def start(cls, spec: ProcessSpec) -> Self:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-m", "deploy.child", str(os.getpid()), spec.module),
            *([f"{LATE}{spec.imported}"] if spec.imported else spec.arguments),
            env=clean_environment(os.environ),
            stdin=asyncio.subprocess.PIPE if spec.imported else asyncio.subprocess.DEVNULL,
            # stdout of the launcher carries one line only; whatever a child prints there is a log.
            stdout=sys.__stderr__,
            stderr=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
            # Ctrl-C reaches the whole foreground group; the launcher alone decides who stops when.
            start_new_session=True,
        )
        return cls(spec, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    @property
    def last_line(self) -> str:
        """The last line that is not blank on the child's stderr."""
        return self._last_line.decode(errors="replace").strip()

    def send_arguments(self, arguments: Sequence[str]) -> None:
        """Lets a process go on that was started without any; once. Nothing happens if it has ended."""
        stream = self._process.stdin
        assert stream is not None, "its arguments were known"
        stream.write(json.dumps(arguments).encode() + b"\n")
        stream.close()

    async def run(self) -> None:
        """Passes stderr on until the process has ended and is reaped."""
        forward = asyncio.ensure_future(self._forward_stderr())
        try:
            await self._process.wait()
            await asyncio.wait([forward], timeout=_STDERR_GRACE_S)
        finally:
            forward.cancel()

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # ended in this moment
            self._process.send_signal(number)

    async def _forward_stderr(self) -> None:
        stream = self._process.stderr
        assert stream is not None
        while line := await _read_line(stream):
            if line.strip():
                self._last_line = line
            with suppress(OSError):  # our own stderr is gone; the child must not block on a full pipe
                sys.stderr.write(line.decode(errors="replace"))
                sys.stderr.flush()


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """A line, or a piece of one that is too long; empty at the end."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.read(error.consumed)


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without our own variables: they are settings of the launcher, and children get theirs as flags."""
    return {name: value for name, value in environ.items() if not name.upper().startswith(ENV_PREFIX)}


class ProcessGroup:
    """Owns children: whoever leaves the context leaves no process behind."""

    def __init__(self) -> None:
        self._runs: dict[asyncio.Future[None], Child] = {}
        self._ended_children: asyncio.Queue[Child] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        if self._runs:
            await asyncio.wait(self._runs)

    async def start(self, spec: ProcessSpec) -> Child:
        child = await Child.start(spec)
        run = asyncio.ensure_future(child.run())
        self._runs[run] = child
        run.add_done_callback(self._ended)
        return child

    async def next_exit(self) -> Child:
        """Each child once, in the order in which they end; its stderr has been read."""
        return await self._ended_children.get()

    def _ended(self, run: asyncio.Future[None]) -> None:
        self._ended_children.put_nowait(self._runs[run])

    async def stop(self, children: Iterable[Child], grace_s: float) -> list[Child]:
        """SIGTERM, then SIGKILL for what is left after `grace_s`; returns those, once all have ended."""
        wanted = set(children)
        runs = [run for run, child in self._runs.items() if child in wanted and not run.done()]
        if not runs:
            return []
        for run in runs:
            self._runs[run].signal(signal.SIGTERM)
        _, late = await asyncio.wait(runs, timeout=grace_s)
        for run in late:
            self._runs[run].signal(signal.SIGKILL)
        await asyncio.wait(runs)
        return [self._runs[run] for run in late]

    def kill(self) -> None:
        for child in self._runs.values():
            if child.exit_code is None:
                child.signal(signal.SIGKILL)


async def race(*contenders: Coroutine[Any, Any, T]) -> T:
    """Result or exception of the first to end (of the earlier one in a tie); the others are cancelled and awaited."""
    tasks = [asyncio.ensure_future(contender) for contender in contenders]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class StopRequests:
    """Counts requests to stop: the first asks for a drain, the second for an end at once."""

    def __init__(self) -> None:
        self._first = asyncio.Event()
        self._second = asyncio.Event()

    def request(self) -> None:
        (self._second if self._first.is_set() else self._first).set()

    async def first(self) -> None:
        await self._first.wait()

    async def second(self) -> None:
        await self._second.wait()

    def listen(self) -> None:
        """Takes SIGINT and SIGTERM of this process; only in the main thread."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.request)
