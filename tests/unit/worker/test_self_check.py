"""The parts of the self-check: what counts as a difference, what a file keeps, and what happens between two steps."""

import math
import random
import resource
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from common.engine.request import EngineRequest, RequestId
from common.engine.solo import SoloRunner
from common.errors import ConfigError
from common.kv.store import KVStore
from common.model.batch import Runner
from common.pb import types_pb2
from common.prompt_logprobs import PromptLogprobs, empty
from common.routing.record import RoutingArray
from common.sampling import Finish, FinishReason, SampledToken, SamplingParams, TokenLogprob
from decode_worker.outbox import Batch, Outbox
from decode_worker.self_check import checker
from decode_worker.self_check.checker import SelfCheck
from decode_worker.self_check.reproducer import PackedTold, Reproducer, ReproducerFiles, read_reproducer
from decode_worker.self_check.tally import Skip
from decode_worker.self_check.told import Kind, Told, compare
from deploy.cli import main
from tests.fakes.fake_runner import EOS_TOKEN_ID, FakeRunner, fake_store

STOP, LENGTH = Finish(FinishReason.STOP), Finish(FinishReason.LENGTH)


def logprob(token_id: int, value: float, rank: int = 1) -> TokenLogprob:
    return TokenLogprob(token_id, value, rank)


def rows(*first_experts: int) -> RoutingArray:
    """One row of 2 layers and 2 experts per argument."""
    return np.array([[[first, 7], [1, 2]] for first in first_experts], np.uint8)


def told(**changes: object) -> Told:
    """Three tokens behind a prompt of four, rows from position 2 on."""
    tokens = tuple(SampledToken(i, logprob(i, -0.5), (logprob(9, -1.5, 2),), b"\1\0\0\0") for i in (5, 6, 7))
    scores = empty(4, 1)
    scores["logprob"][1:] = -2.0
    whole = Told(tokens, rows(0, 1, 2, 3), LENGTH, scores)
    return replace(whole, **changes)  # type: ignore[arg-type]


def with_token(index: int, **changes: object) -> Told:
    whole = told()
    tokens = list(whole.tokens)
    tokens[index] = msgspec.structs.replace(tokens[index], **changes)
    return replace(whole, tokens=tuple(tokens))


def scores_but_for(position: int, value: float) -> PromptLogprobs:
    scores = empty(4, 1)
    scores["logprob"][1:] = -2.0
    scores["logprob"][position, 1] = value
    return scores


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (told(), {}),
        (with_token(1, weight_version="another"), {}),
        (with_token(1, token_id=8), {Kind.TOKEN_IDS: 5}),
        (with_token(2, logprob=logprob(7, math.nextafter(-0.5, 0))), {}),  # the same as a float32
        (with_token(2, logprob=logprob(7, float(np.nextafter(np.float32(-0.5), np.float32(0))))), {Kind.LOGPROBS: 6}),
        (with_token(0, top=(logprob(9, -1.5, 3),)), {Kind.LOGPROBS: 4}),
        (with_token(0, top=()), {Kind.LOGPROBS: 4}),
        (with_token(0, mask=None), {Kind.SAMPLING_MASK: 4}),
        (told(rows_TLK=rows(0, 1, 6, 3)), {Kind.ROUTED_EXPERTS: 4}),
        (told(rows_TLK=rows(0, 1, 2)), {Kind.ROUTED_EXPERTS: 5}),
        (told(rows_TLK=rows(0, 1, 2, 3).astype(np.uint16)), {Kind.ROUTED_EXPERTS: 2}),
        (told(rows_TLK=None), {Kind.ROUTED_EXPERTS: 2}),
        (told(finish=STOP), {Kind.FINISH_REASON: 6}),
        (told(prompt_logprobs=scores_but_for(3, -2.5)), {Kind.PROMPT_LOGPROBS: 3}),
        (told(prompt_logprobs=None), {Kind.PROMPT_LOGPROBS: 0}),
        (
            replace(told(), tokens=told().tokens[:2], rows_TLK=rows(0, 1, 2)),
            {Kind.TOKEN_IDS: 6, Kind.ROUTED_EXPERTS: 5},
        ),
    ],
)
def test_where_two_answers_differ_first(other: Told, expected: dict[Kind, int]) -> None:
    assert compare(told(), other, 4, 2) == expected
    assert compare(other, told(), 4, 2) == expected


def test_bits_count_and_not_what_equals() -> None:
    nan = with_token(0, logprob=logprob(5, math.nan))
    assert compare(nan, nan, 4, 2) == {}
    zeros = with_token(0, logprob=logprob(5, 0.0)), with_token(0, logprob=logprob(5, -0.0))
    assert compare(*zeros, 4, 2) == {Kind.LOGPROBS: 4}


def test_no_row_and_an_empty_array_are_the_same() -> None:
    assert compare(told(rows_TLK=None), told(rows_TLK=rows()[:0].reshape(0, 2, 2)), 4, 4) == {}


# --- files


def reproducer(request_id: str = "r", served: Told | None = None) -> Reproducer:
    sampling = SamplingParams(
        max_tokens=3,
        seed=-(2**63),
        logit_bias={7: -2.5},
        stop_token_ids=frozenset({3, 1}),
        bad_words=((1, 2), (3,)),
        prompt_logprobs=1,
    )
    return Reproducer(
        request_id=request_id,
        choice=1,
        found_at="2026-01-01T00:00:00+00:00",
        family="qwen3_moe",
        fingerprint="f",
        weight_version="0",
        numerics="n",
        prompt=(1, 2, 3, 4),
        sampling=sampling,
        routing_start=2,
        differences={"token_ids": 4},
        served=PackedTold.pack(served or told()),
        solo=None,
        solo_error="InternalError: why",
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_a_file_keeps_every_bit(tmp_path: Path, dtype: type[np.integer]) -> None:
    odd = with_token(0, logprob=logprob(5, -math.inf), top=(logprob(1, math.nan), logprob(2, float(np.float32(-0.1)))))
    odd = replace(odd, rows_TLK=(rows(0, 1, 2, 3) + np.uint8(200)).astype(dtype))
    kept = read_reproducer(ReproducerFiles(tmp_path / "new", 5).write(reproducer(served=odd)))
    assert kept == reproducer(served=odd)
    again = kept.served.unpack(kept.num_top)
    assert compare(odd, again, 4, 2) == {}
    assert again.rows_TLK is not None
    assert again.rows_TLK.dtype == dtype


def test_only_the_newest_files_stay_and_foreign_ones_are_left_alone(tmp_path: Path) -> None:
    files = ReproducerFiles(tmp_path, 2)
    (tmp_path / "notes.txt").write_text("mine")
    written = [files.write(reproducer(str(number))) for number in range(4)]
    assert list_of(tmp_path) == [tmp_path / "notes.txt", *written[2:]]
    assert read_reproducer(written[3]).request_id == "3"


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """A full disk would fill further."""
    files = ReproducerFiles(tmp_path, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            files.write(reproducer())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list_of(tmp_path) == []


def test_what_killed_processes_have_left_makes_room(tmp_path: Path) -> None:
    (tmp_path / "self-check-20250101T000000000000Z-00000000.tmp").write_bytes(b"{")
    (tmp_path / "self-check-99990101T000000000000Z-00000000.tmp").write_bytes(b"{")
    files = ReproducerFiles(tmp_path, 2)
    written = files.write(reproducer())
    assert list_of(tmp_path) == [written, tmp_path / "self-check-99990101T000000000000Z-00000000.tmp"]


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ('"shape":[', '"shape":[9'),
        ('"logprob":"-0x1', '"logprob":"?'),
        ('"logprob":"-0x1.', '"logprob":"-0x1p99999.'),
        ('"prompt_logprobs":"', '"prompt_logprobs":"AAAA'),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, was: str, now: str) -> None:
    path = ReproducerFiles(tmp_path, 2).write(reproducer())
    text = path.read_text()
    assert was in text
    path.write_text(text.replace(was, now, 1))
    with pytest.raises(ConfigError, match=f"{path.name} is damaged; copy it from the worker's --self-check-dir again"):
        read_reproducer(path)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"format": 2}'])
def test_what_is_no_such_file_is_refused_in_one_line(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ConfigError, match="is no file of a self-check"):
        read_reproducer(tmp_path / "file")
    assert main(["replay"]) == 2
    assert "--model" in capsys.readouterr().err


def test_a_directory_that_cannot_be_made_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--self-check-dir .*/file/below: .*; name a directory"):
        ReproducerFiles(tmp_path / "file" / "below", 2)


# --- between two steps


class FakeEngine:
    """Remembers what it was given to do."""

    def __init__(self) -> None:
        self.num_wakes = 0

    def use_spare_time(self, work: Callable[[], bool], let_go: Callable[[], None]) -> None:
        self.work, self.let_go = work, let_go

    def wake(self) -> None:
        self.num_wakes += 1


@dataclass
class FakeWorker:
    """A worker on the fake model; `runners` are those of the solo runs."""

    engine: FakeEngine
    store: KVStore
    description: types_pb2.ModelDescription
    runners: list[FakeRunner]

    @property
    def make_solo_runner(self) -> Callable[[KVStore], Runner]:
        def make(store: KVStore) -> Runner:
            self.runners.append(FakeRunner(store))
            return self.runners[-1]

        return make


REQUEST = EngineRequest(RequestId("r"), tuple(range(5, 15)), SamplingParams(6, temperature=0.0, ignore_eos=True), 0)


def fake_worker() -> FakeWorker:
    description = types_pb2.ModelDescription(weight_version="0", eos_token_ids=[EOS_TOKEN_ID])
    return FakeWorker(FakeEngine(), fake_store(8), description, [])


async def serve(check: SelfCheck, request: EngineRequest = REQUEST) -> None:
    """Tells a request what its solo run says."""
    store = fake_store(16)
    solo = SoloRunner(FakeRunner(store), store, frozenset({EOS_TOKEN_ID}), weight_version="0")
    result = solo.run(request.prompt, request.sampling, 0)
    outbox = Outbox()
    with check.watching(request, outbox):
        assert outbox.on_taken is not None
        assert result.rows_TLK is not None
        outbox.on_taken([Batch(0, list(result.tokens[:2]), [result.rows_TLK[:4]])])
        outbox.on_taken([Batch(0, list(result.tokens[2:]), [result.rows_TLK[4:]], finish=result.finish)])


def list_of(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def run_out(check: SelfCheck) -> int:
    """Uses spare time until nothing is left; the number of things that were done."""
    number = 0
    while check.spare():
        number += 1
    return number


async def test_one_forward_pass_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "PIECE_TOKENS", 4)
    worker = fake_worker()
    check = SelfCheck(worker, 1.0, max_tokens=100)
    assert not check.spare()
    await serve(check)
    assert worker.engine.num_wakes == 1
    steps = []
    while check.spare():
        steps.append(sum(len(runner.batches) for runner in worker.runners))
    # The beginning, three pieces of the prompt, five tokens that are forwarded, and the comparison.
    assert steps == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8]
    assert (check.tally.checked, check.num_waiting) == (1, 0)
    assert not any(check.tally.different.values())
    check.close()


async def test_a_run_under_way_is_given_up_when_the_engine_freezes() -> None:
    worker = fake_worker()
    check = SelfCheck(worker, 1.0, max_tokens=100)
    await serve(check)
    await serve(check, replace(REQUEST, request_id=RequestId("s")))
    assert check.spare()
    assert check.spare()
    check.let_go()
    check.let_go()
    assert (check.tally.skipped[Skip.PAUSED], check.num_waiting) == (1, 1)
    run_out(check)
    assert check.tally.checked == 1
    check.close()


async def test_weights_that_change_between_two_steps_end_the_run() -> None:
    worker = fake_worker()
    check = SelfCheck(worker, 1.0, max_tokens=100)
    await serve(check)
    check.spare()
    check.spare()
    worker.description = types_pb2.ModelDescription(weight_version="1")
    run_out(check)
    assert (check.tally.skipped[Skip.WEIGHTS], check.tally.checked) == (1, 0)
    check.close()


async def test_a_check_that_breaks_harms_nobody() -> None:
    worker = fake_worker()
    check = SelfCheck(worker, 1.0, max_tokens=100)
    await serve(check)
    await serve(check, replace(REQUEST, request_id=RequestId("s")))
    check.spare()
    worker.runners[0].fails_on = lambda chunks: True
    run_out(check)
    assert (check.tally.skipped[Skip.FAILED], check.tally.checked) == (1, 1)
    assert not any(check.tally.different.values())
    check.close()


async def test_a_solo_run_that_ends_in_an_error_is_a_difference(tmp_path: Path) -> None:
    worker = fake_worker()
    check = SelfCheck(worker, 1.0, max_tokens=100, files=ReproducerFiles(tmp_path, 2))
    await serve(check)
    check.spare()
    worker.runners[0].nan_after = lambda chunk: chunk.end == 12
    run_out(check)
    check.close()
    assert (check.tally.different[Kind.SOLO_RUN], check.tally.checked) == (1, 1)
    [file] = list_of(tmp_path)
    kept = read_reproducer(file)
    assert kept.solo is None
    assert kept.solo_error is not None
    assert kept.solo_error.startswith("InternalError: ")


async def test_a_request_that_should_have_gone_on_is_found() -> None:
    """The solo run is not followed to its end: one token more than was served says enough."""
    worker = fake_worker()
    check = SelfCheck(worker, 1.0, max_tokens=100)
    await serve(check)
    long = replace(REQUEST, sampling=replace(REQUEST.sampling, max_tokens=50))
    job = check._waiting.popleft()
    check._waiting.append(replace(job, request=long))
    run_out(check)
    assert {kind for kind, number in check.tally.different.items() if number} == {
        Kind.TOKEN_IDS,
        Kind.ROUTED_EXPERTS,
    }
    assert len(worker.runners[0].batches) == 1 + 6
    check.close()


async def test_nothing_is_recorded_of_requests_that_are_not_drawn() -> None:
    check = SelfCheck(fake_worker(), 0.5, max_tokens=100, rng=random.Random(1))
    drawn = 0
    for _ in range(400):
        outbox = Outbox()
        with check.watching(REQUEST, outbox):
            drawn += outbox.on_taken is not None
    assert 150 < drawn < 250
    assert check.tally.skipped[Skip.UNFINISHED] == drawn
    check.close()
