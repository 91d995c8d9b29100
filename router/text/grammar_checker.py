"""Grammars that clients choose, checked by a child process: whatever they cost, the router goes on."""

import asyncio
import hashlib
import json
import sys
from collections import OrderedDict
from collections.abc import Mapping
from types import TracebackType
from typing import Literal, Self

import structlog

from common.errors import InvalidRequestError, UnavailableError

Param = Literal["structured_outputs", "response_format"]

#: `{"grammar"}`, or `{"message", "param"}` of a refusal.
Reply = dict[str, str | None]

#: Wall time of one check: several times what it may compute, because cores may be busy.
CHECK_TIMEOUT_S = 5.0

#: Of the child, which takes half a second where cores are free. However late it is, that is no fault of the grammar.
START_TIMEOUT_S = 60.0

#: Rollouts send one grammar again and again, a good one as well as a bad one.
NUM_REMEMBERED = 256

#: A grammar's bytes may become six characters each in JSON, and other fields stand around it.
MAX_QUESTION_FACTOR, MAX_QUESTION_EXTRA = 6, 64 * 2**10

#: Longest answer line: a grammar grows a little when it is wrapped.
MAX_LINE_BYTES = 64 * 2**20

#: First line of a child.
READY = b"ready\n"

log = structlog.get_logger()


class GrammarChecker:
    """One child, started with the first grammar and anew after each that it did not survive; one check at a time."""

    def __init__(self, max_bytes: int, *, timeout_s: float = CHECK_TIMEOUT_S) -> None:
        """`max_bytes`: longest schema, regex or grammar."""
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        #: The one that said that it is ready.
        self._child: asyncio.subprocess.Process | None = None
        #: Shared by all that wait for a child; ends with None, or with why there is none.
        self._start: asyncio.Task[str | None] | None = None
        self._is_closed = False
        #: Answers by the digest of their question.
        self._known: OrderedDict[bytes, Reply] = OrderedDict()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        if self._start is not None:
            self._start.cancel()
            await asyncio.wait([self._start])
        await self._end_child()

    async def grammar(self, param: Param, fields: Mapping[str, object]) -> str | None:
        """llguidance's form of what `structured_outputs` or `response_format` asks for; None if it asks for nothing.

        Raises:
            InvalidRequestError: it is wrong, or takes too much to compile.
            UnavailableError: no child can be started, or it does not get ready.
        """
        line = json.dumps({"param": param, "fields": fields, "max_bytes": self._max_bytes})
        limit = MAX_QUESTION_FACTOR * self._max_bytes + MAX_QUESTION_EXTRA
        if len(line) > limit:
            raise InvalidRequestError(f"{param}: has {len(line)} characters of JSON, at most {limit}", param=param)
        reply = await self._reply(param, line)
        if "message" in reply:
            raise InvalidRequestError(str(reply["message"]), param=reply["param"])
        return reply["grammar"]

    async def _reply(self, param: Param, line: str) -> Reply:
        digest = hashlib.sha256(line.encode()).digest()
        while digest not in self._known:
            await self._until_ready()
            async with self._turn:  # meanwhile somebody else may have asked the same, or something that ended the child
                child = self._living_child()
                if child is not None and digest not in self._known:
                    self._known[digest] = await self._ask(child, param, line)
        if len(self._known) > NUM_REMEMBERED:
            self._known.popitem(last=False)
        self._known.move_to_end(digest)
        return self._known[digest]

    async def _ask(self, child: asyncio.subprocess.Process, param: Param, line: str) -> Reply:
        """The child's answer. A child that is not done with a question is of no use any more, also if cancelled."""
        answered = False
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._exchange(child, line)
            answered = reply is not None
        except TimeoutError:
            reply = None
        finally:
            if not answered:
                await asyncio.shield(self._end_child())
        if reply is None:
            log.warning("grammar_too_costly", param=param, num_chars=len(line))
            return {"message": f"{param}: takes too much time or memory to compile; make it simpler", "param": param}
        return reply

    async def _exchange(self, child: asyncio.subprocess.Process, line: str) -> Reply | None:
        """None if the child died of the question."""
        assert child.stdin is not None, "the child has pipes"
        assert child.stdout is not None, "the child has pipes"
        try:
            child.stdin.write(line.encode() + b"\n")
            await child.stdin.drain()
            answer = await child.stdout.readline()
        except ConnectionError:
            return None
        if not answer:
            return None
        reply: Reply = json.loads(answer)
        return reply

    def _living_child(self) -> asyncio.subprocess.Process | None:
        return None if self._child is None or self._child.returncode is not None else self._child

    async def _until_ready(self) -> None:
        """Not in one's turn, so that all wait for one start at once; it goes on if those that wait for it leave."""
        if self._living_child() is not None:
            return
        if self._is_closed:
            raise UnavailableError("the router shuts down")
        if self._start is None or self._start.done():
            self._start = asyncio.create_task(self._start_child())
        fault = await asyncio.shield(self._start)
        if fault is not None:
            raise UnavailableError(f"the process for structured outputs has not started: {fault}; try again")

    async def _start_child(self) -> str | None:
        """Why there is none; None once it is ready."""
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "router.text.grammar_child",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                # The router's own may be a pipe that somebody reads to its end.
                stderr=asyncio.subprocess.DEVNULL,
                limit=MAX_LINE_BYTES,
            )
        except OSError as error:
            fault: str | None = str(error)
        else:
            fault = await self._take(child)
        if fault is not None:
            log.warning("grammar_child_not_started", reason=fault)
        return fault

    async def _take(self, child: asyncio.subprocess.Process) -> str | None:
        """Like `_start_child`. A child that does not get ready is ended, also if this is cancelled."""
        fault: str | None = "the checker is closed"
        try:
            fault = await _fault_of_start(child)
        finally:
            if fault is None:
                self._child = child
            else:
                await _end(child)
        return fault

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await _end(child)


async def _fault_of_start(child: asyncio.subprocess.Process) -> str | None:
    """None if it is ready."""
    assert child.stdout is not None, "the child has pipes"
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            line = await child.stdout.readline()
            if not line:
                return f"it ended with code {await child.wait()}"
    except TimeoutError:
        return f"it was not ready after {START_TIMEOUT_S:g} s"
    return None if line == READY else "it said something else than that it is ready"


async def _end(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        child.kill()
        await child.wait()
