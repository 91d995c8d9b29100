"""Grammars in a child process: right answers, and whatever a grammar does to the child, the next one is answered."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from common.errors import InvalidRequestError, UnavailableError
from router.text import grammar_checker
from router.text.grammar import grammar_of_response_format, grammar_of_structured_outputs
from router.text.grammar_checker import GrammarChecker, Param, Reply

MAX_BYTES = 2**16

#: Makes children run this code before their own.
AtStart = Callable[[str], object]


@pytest.fixture
def at_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AtStart:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # what was compiled in the same second counts as current
    return (tmp_path / "sitecustomize.py").write_text


def child_pid(checker: GrammarChecker) -> int | None:
    return None if checker._child is None else checker._child.pid


async def test_answers_are_those_of_the_checks_themselves() -> None:
    async with GrammarChecker(MAX_BYTES) as checker:
        for fields in ({"regex": "a+"}, {"choice": ["x", "é"]}, {"json": {"type": "object"}}, {}):
            expected = grammar_of_structured_outputs(fields, max_bytes=MAX_BYTES)
            assert await checker.grammar("structured_outputs", fields) == expected
        wanted: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
        expected = grammar_of_response_format(wanted, max_bytes=MAX_BYTES)
        assert await checker.grammar("response_format", wanted) == expected


async def test_refusals_keep_their_words() -> None:
    async with GrammarChecker(5) as checker:
        with pytest.raises(InvalidRequestError, match="regex has 6 bytes, more than the 5 allowed") as caught:
            await checker.grammar("structured_outputs", {"regex": "abcdef"})
        assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize("multiple", [999983, 223092870])
async def test_a_grammar_that_explodes_is_refused_and_the_next_one_answered(multiple: int) -> None:
    """llguidance builds an automaton with a state per remainder: gigabytes, minutes."""
    async with GrammarChecker(MAX_BYTES, timeout_s=2.0) as checker:
        await checker.grammar("structured_outputs", {"regex": "a"})  # the child is up
        with pytest.raises(InvalidRequestError, match="make it simpler") as caught:
            async with asyncio.timeout(25):  # less than the kernel gives the child, which ends with the same words
                await checker.grammar("structured_outputs", {"json": {"type": "integer", "multipleOf": multiple}})
        assert caught.value.param == "structured_outputs"
        assert await checker.grammar("structured_outputs", {"regex": "b"}) is not None


async def test_a_child_that_died_is_replaced() -> None:
    async with GrammarChecker(MAX_BYTES) as checker:
        assert await checker.grammar("structured_outputs", {"regex": "a"}) is not None
        pid = child_pid(checker)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        outcomes = []
        for text in ("b", "c"):  # the first may meet the dying child
            try:
                outcomes.append(await checker.grammar("structured_outputs", {"regex": text}))
            except InvalidRequestError:
                outcomes.append(None)
        assert outcomes[-1] is not None


async def test_a_child_that_is_late_costs_no_grammar_its_answer(at_start: AtStart) -> None:
    """As on a machine that stands still while it starts."""
    at_start("import time; time.sleep(4)")
    async with GrammarChecker(MAX_BYTES, timeout_s=3.0) as checker:
        assert await checker.grammar("structured_outputs", {"regex": "a"}) is not None


class StartCountingChecker(GrammarChecker):
    """Counts the children."""

    num_started = 0

    async def _start_child(self) -> str | None:
        self.num_started += 1
        return await super()._start_child()


@pytest.mark.parametrize(
    ("code", "timeout_s", "reason"),
    [
        ("import os; os._exit(3)", 60.0, "it ended with code 3"),
        ("import time; time.sleep(600)", 0.5, "it was not ready after 0.5 s"),
        ("print('hello', flush=True)", 60.0, "it said something else than that it is ready"),
    ],
    ids=["ends", "hangs", "says something else"],
)
async def test_all_that_wait_learn_from_one_start_why_it_failed(
    at_start: AtStart, monkeypatch: pytest.MonkeyPatch, code: str, timeout_s: float, reason: str
) -> None:
    at_start(code)
    async with StartCountingChecker(MAX_BYTES) as checker:
        asked = [checker.grammar("structured_outputs", {"regex": text}) for text in "abc"]
        with monkeypatch.context() as patch, capture_logs() as logs:
            patch.setattr(grammar_checker, "START_TIMEOUT_S", timeout_s)
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {UnavailableError}
        assert all(f"has not started: {reason}; try again" in str(outcome) for outcome in outcomes)
        assert checker.num_started == 1
        assert [(line["event"], line["reason"]) for line in logs] == [("grammar_child_not_started", reason)]
        at_start("")
        assert await checker.grammar("structured_outputs", {"regex": "a"}) is not None


#: Says its pid, and goes on once there is a file "go".
WAIT_FOR_GO = """
import os, pathlib, time
here = pathlib.Path(__file__).parent
(here / "pid").write_text(str(os.getpid()))
while not (here / "go").exists():
    time.sleep(0.01)
"""


def said_pid(folder: Path) -> int | None:
    """Of the child that waits in `folder`; None before it does."""
    text = (folder / "pid").read_text() if (folder / "pid").exists() else ""
    return int(text) if text else None


async def waiting_pid(folder: Path) -> int:
    async with asyncio.timeout(60):
        while (pid := said_pid(folder)) is None:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)
    return pid


async def test_a_client_that_leaves_does_not_end_the_start(at_start: AtStart, tmp_path: Path) -> None:
    at_start(WAIT_FOR_GO)
    async with GrammarChecker(MAX_BYTES) as checker:
        asked = asyncio.ensure_future(checker.grammar("structured_outputs", {"regex": "a"}))
        pid = await waiting_pid(tmp_path)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        (tmp_path / "go").touch()
        assert await checker.grammar("structured_outputs", {"regex": "b"}) is not None
        assert child_pid(checker) == pid


async def test_closing_ends_a_start_and_allows_no_other(at_start: AtStart, tmp_path: Path) -> None:
    at_start(WAIT_FOR_GO)
    async with asyncio.timeout(50), GrammarChecker(MAX_BYTES) as checker:  # less than the start may take
        asked = asyncio.ensure_future(checker.grammar("structured_outputs", {"regex": "a"}))
        pid = await waiting_pid(tmp_path)
    await asyncio.wait([asked])
    assert asyncio.all_tasks() == {asyncio.current_task()}
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(UnavailableError, match="shuts down"):
        await checker.grammar("structured_outputs", {"regex": "a"})


async def test_a_known_grammar_needs_no_child() -> None:
    async with GrammarChecker(MAX_BYTES) as checker:
        first = await checker.grammar("structured_outputs", {"regex": "a"})
    assert child_pid(checker) is None
    assert await checker.grammar("structured_outputs", {"regex": "a"}) == first
    assert child_pid(checker) is None


class CountingChecker(GrammarChecker):
    """Counts what the child is asked."""

    num_asked = 0

    async def _ask(self, child: asyncio.subprocess.Process, param: Param, line: str) -> Reply:
        self.num_asked += 1
        return await super()._ask(child, param, line)


async def test_refusals_are_remembered_and_asked_for_once() -> None:
    """A group of rollouts with one bad schema: the first waits, the others learn from it."""
    fields = {"json": {"type": "integer", "multipleOf": 223092870}}
    async with CountingChecker(MAX_BYTES, timeout_s=1.0) as checker:
        asked = [checker.grammar("structured_outputs", fields) for _ in range(20)]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {InvalidRequestError}
        assert checker.num_asked == 1


async def test_questions_are_bounded_and_not_kept() -> None:
    """Fields that are no grammar: a pattern that is not used, a description."""
    async with GrammarChecker(100) as checker:
        with pytest.raises(InvalidRequestError, match="characters of JSON, at most 66136"):
            await checker.grammar("structured_outputs", {"regex": "a", "whitespace_pattern": "x" * 70_000})
        assert await checker.grammar("structured_outputs", {"regex": "a"}) is not None
        assert sum(map(len, checker._known)) == 32


async def test_a_client_that_leaves_ends_the_check() -> None:
    async with GrammarChecker(MAX_BYTES) as checker:
        await checker.grammar("structured_outputs", {"regex": "a"})
        pid = child_pid(checker)
        asked = asyncio.ensure_future(
            checker.grammar("structured_outputs", {"json": {"type": "integer", "multipleOf": 223092870}})
        )
        await asyncio.sleep(0)  # it has its turn and has written its question
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert await checker.grammar("structured_outputs", {"regex": "b"}) is not None
        assert child_pid(checker) != pid
