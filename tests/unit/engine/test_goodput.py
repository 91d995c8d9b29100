"""An engine with objectives, on a clock of its own: steps keep to them, everybody gets through, bytes stay the same."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from common.engine.objectives import Attainment, Objectives
from common.engine.request import EngineRequest, RequestId, Work
from common.errors import OverloadedError
from common.model.batch import Chunk
from tests.fakes.heard_stages import HeardStages
from tests.unit.engine.rig import FakeRig, SlowRig, Transcript, greedy, limits, make_request, solo

BUDGET = 64


def linear(chunks: Sequence[Chunk]) -> float:
    """10 ms per step and 1 ms per token."""
    return 0.010 + 0.001 * num_tokens(chunks)


def num_tokens(chunks: Sequence[Chunk]) -> int:
    return sum(len(chunk.token_ids) for chunk in chunks)


def rig(objectives: Objectives, *, seats: int = 8, num_blocks: int = 256) -> SlowRig:
    bounds = limits(
        max_num_batched_tokens=BUDGET, max_num_seqs=seats, max_model_len=400, objectives=objectives, max_waiting=1000
    )
    return SlowRig(linear, num_blocks=num_blocks, bounds=bounds)


def ask(name: str, num_prompt: int, max_tokens: int, *, first: int = 3, work: Work = Work.WHOLE) -> EngineRequest:
    """No two prompts begin alike, so that nothing is found in the prefix cache."""
    prompt = [3 + (first * 7 + 5 * i + i // 40) % 46 for i in range(num_prompt)]
    return make_request(name, prompt, greedy(max_tokens), work=work)


def warmed_up(objectives: Objectives, *, seats: int = 8) -> SlowRig:
    """One that knows what prompts and decodes take."""
    made = rig(objectives, seats=seats)
    for i in range(10):
        made.submit(ask(f"warm{i}", 10 + 5 * i, 3 + i % 3, first=30 + i))
        if i % 3:
            made.run()
    made.run()
    made.runner.batches.clear()
    made.runner.seconds.clear()
    return made


def mixed_seconds(made: SlowRig) -> list[float]:
    """Of the steps in which somebody decodes beside a part of a prompt."""
    pairs = zip(made.runner.batches, made.runner.seconds, strict=True)
    return [s for chunks, s in pairs if any(len(c.token_ids) == 1 for c in chunks) and num_tokens(chunks) > len(chunks)]


def test_prompts_beside_decodes_are_cut_so_that_steps_are_in_time() -> None:
    """40 ms are 30 tokens: one or two decodes and 16 of the prompt, in tiles of 16, instead of 62."""
    made = warmed_up(Objectives(itl_s=0.040))
    stream = made.submit(ask("stream", 5, 60))
    made.step()
    prompt = made.submit(ask("prompt", 200, 4, first=9))
    made.run()
    assert mixed_seconds(made)
    assert max(mixed_seconds(made)) <= 0.040
    assert len(mixed_seconds(made)) >= 200 // 16
    for transcript in (stream, prompt):
        transcript.assert_equals(solo(transcript.request))
    made.assert_baseline()


def test_without_an_objective_steps_are_as_large_as_the_setting_allows() -> None:
    made = warmed_up(Objectives())
    made.submit(ask("stream", 5, 60))
    made.step()
    made.submit(ask("prompt", 200, 4, first=9))
    made.run()
    assert max(num_tokens(chunks) for chunks in made.runner.batches) == BUDGET
    # 63 beside the one that decodes, three times; then 11, and those that follow.
    assert mixed_seconds(made) == pytest.approx([0.074, 0.074, 0.074, 0.022])


def test_a_prompt_that_nobody_decodes_beside_is_not_cut() -> None:
    made = warmed_up(Objectives(itl_s=0.030))
    made.submit(ask("prompt", 200, 1))
    made.run()
    assert [num_tokens(chunks) for chunks in made.runner.batches] == [64, 64, 64, 8]


def test_a_prefill_worker_computes_whole_chunks() -> None:
    made = warmed_up(Objectives(itl_s=0.001))
    for i in range(3):
        made.submit(ask(f"p{i}", 100, 5, first=i, work=Work.PREFILL))
    made.run()
    assert [num_tokens(chunks) for chunks in made.runner.batches] == [64, 64, 64, 64, 44]


def test_short_prompts_in_short_steps_of_a_long_one_change_no_bytes() -> None:
    """40 ms are 30 tokens, in tiles of 16 one; the last 29 fit whole."""
    bounds = limits(max_num_batched_tokens=BUDGET, max_model_len=400)
    made = SlowRig(linear, bounds=replace(bounds, max_contended_step_s=0.040))
    for i in range(10):
        made.submit(ask(f"warm{i}", 60, 1, first=30 + i))
        made.run()
    made.runner.batches.clear()
    long = made.submit(ask("long", 240, 1, first=20))
    made.step()
    transcripts = [long]
    for i in range(6):
        transcripts.append(made.submit(ask(f"short{i}", 5 + i, 1, first=i)))
        made.step()
    made.run()
    assert [num_tokens(chunks) for chunks in made.runner.batches] == [64, *[16] * 12, 29]
    for transcript in transcripts:
        transcript.assert_equals(solo(transcript.request))
    made.assert_baseline()


def test_no_more_decode_at_a_time_than_are_in_time() -> None:
    """15.5 ms are five sequences."""
    made = warmed_up(Objectives(itl_s=0.0155))
    transcripts = [made.submit(ask(f"r{i}", 4, 20, first=i)) for i in range(12)]
    most = 0
    while made.step():
        most = max(most, made.core.load().running)
    assert most == 5
    for transcript in transcripts:
        transcript.assert_equals(solo(transcript.request))
    made.assert_baseline()


def test_an_objective_that_cannot_be_kept_starves_nobody() -> None:
    made = warmed_up(Objectives(ttft_s=100.0, itl_s=1e-6))
    transcripts = [made.submit(ask(f"r{i}", 30 + i, 5, first=i)) for i in range(6)]
    most = 0
    while made.step():
        most = max(most, made.core.load().running)
    assert most == 1
    for transcript in transcripts:
        transcript.assert_equals(solo(transcript.request))
    assert made.core.attainment.itl.missed == 6 + 10
    made.assert_baseline()


def test_a_stall_of_the_machine_does_not_shrink_what_follows() -> None:
    made = warmed_up(Objectives(itl_s=0.040))
    made.submit(ask("stream", 5, 80))
    for _ in range(5):
        made.step()
    made.runner.cost = lambda chunks: 30.0
    made.step()
    made.runner.cost = linear
    made.submit(ask("prompt", 100, 1, first=9))
    made.step()
    assert num_tokens(made.runner.batches[-1]) == 17


def test_steps_with_objectives_are_foretold() -> None:
    """Once step times are known, what is told about the next step is what it computes."""
    made = warmed_up(Objectives(itl_s=0.040))
    made.runner.forecasts.clear()
    made.submit(ask("stream", 5, 40))
    made.step()
    made.submit(ask("prompt", 150, 2, first=9))
    made.run()
    told = [[(c.start, c.end) for c in chunks] for chunks in made.runner.forecasts[:-1]]
    done = [[(c.start, c.end) for c in chunks] for chunks in made.runner.batches[1:]]
    wrong = [at for at, (a, b) in enumerate(zip(told, done, strict=True)) if a != b]
    assert wrong == [0]  # when the prompt came


# --- TTFT


def test_a_hopeless_request_is_refused_and_those_before_it_get_through() -> None:
    """Chunks of 64 take 74 ms, so 1 s is good for some 850 tokens of prompts."""
    made = warmed_up(Objectives(ttft_s=1.0))
    transcripts: list[Transcript] = []
    refused = 0
    for i in range(20):
        request = ask(f"r{i}", 100, 1, first=i)
        try:
            transcripts.append(made.submit(request))
        except OverloadedError:
            refused += 1
        if not i:
            made.step()  # so that the rate is known; 36 tokens of the first one are left
    assert refused == made.admission.num_refused_late
    assert 7 <= len(transcripts) <= 10
    made.run()
    for transcript in transcripts:
        transcript.assert_equals(solo(transcript.request))
    assert made.core.attainment.ttft.missed == 0
    made.assert_baseline()


def test_an_urgent_request_is_let_in_before_those_that_wait() -> None:
    made = warmed_up(Objectives(ttft_s=1.0))
    made.submit(ask("first", 100, 1))
    made.step()
    for i in range(7):
        made.submit(replace(ask(f"later{i}", 100, 1, first=i), priority=1))
    with pytest.raises(OverloadedError):
        made.submit(replace(ask("latest", 100, 1), priority=1))
    urgent = made.submit(ask("urgent", 100, 1, first=20))
    while not urgent.ended:
        made.step()
    assert made.core.attainment.ttft.missed == 0


def test_a_request_of_an_idle_engine_is_never_refused() -> None:
    made = warmed_up(Objectives(ttft_s=0.001))
    made.submit(ask("r", 300, 1))
    made.run()
    assert made.core.attainment.ttft.missed > 0


def test_a_pause_says_nothing_about_how_long_others_will_wait() -> None:
    """Of those in line during a pause the wait counts without it; their time to first token includes it."""
    made = warmed_up(Objectives(ttft_s=1.0), seats=1)
    made.core.observer = stages = HeardStages()
    transcripts = [made.submit(ask("seated", 5, 90))]
    made.step()
    transcripts.append(made.submit(ask("before", 5, 1, first=1)))
    made.clock.now += 0.5
    made.core.close_admission()
    made.clock.now += 30.0
    transcripts.append(made.submit(ask("meanwhile", 5, 1, first=2)))
    made.clock.now += 30.0
    made.core.open_admission()
    transcripts.append(made.submit(ask("after", 5, 1, first=4)))
    made.clock.now += 0.6  # "before" has waited for 1.1 s that count
    with pytest.raises(OverloadedError):
        made.submit(ask("late", 5, 1, first=5))
    made.run()
    for transcript in transcripts:
        transcript.assert_equals(solo(transcript.request))
    assert [int(wait) for wait in stages.waited] == [0, 62, 31, 1]
    assert made.core.attainment.ttft.missed == 3


def test_what_was_cancelled_is_not_ahead_any_more() -> None:
    made = warmed_up(Objectives(ttft_s=0.2))
    made.submit(ask("long", 390, 1))
    made.step()
    with pytest.raises(OverloadedError):
        made.submit(ask("r", 10, 1))
    made.cancel(RequestId("long"))
    made.run()
    made.submit(ask("r", 10, 1))


# --- attainment


def test_attainment_by_hand() -> None:
    """One token per step of 10 ms + 1 ms per token."""
    made = SlowRig(linear, bounds=limits(objectives=Objectives(ttft_s=0.0151, itl_s=0.0111)))
    counts = made.core.attainment
    # 5 prompt tokens take 15 ms, each token 11 ms.
    made.submit(ask("good", 5, 4))
    made.run()
    assert (counts.ttft.met, counts.itl.met, counts.all.met) == (1, 1, 1)
    # 6 prompt tokens take 16 ms.
    made.submit(ask("late", 6, 4, first=1))
    made.run()
    assert (counts.ttft.missed, counts.itl.met, counts.all.missed) == (1, 2, 1)
    # Two steps of 11 ms, and two of 12 ms with a token of another request.
    made.submit(ask("slow", 5, 5, first=2))
    made.step()
    made.step()
    made.submit(ask("beside", 1, 2, first=3))
    made.run()
    assert counts.itl.missed == 2
    assert (counts.all.met, counts.all.missed) == (1, 3)


def test_a_single_token_has_no_time_between_tokens() -> None:
    made = SlowRig(linear, bounds=limits(objectives=Objectives(itl_s=1e-9)))
    made.submit(ask("r", 5, 1))
    made.run()
    assert (made.core.attainment.itl.met, made.core.attainment.itl.missed) == (1, 0)


def test_the_slowest_choice_counts() -> None:
    """Choice 0 goes on alone: 11 ms per token. While both decode it is 12 ms."""
    for itl_s, met in [(0.0121, 1), (0.0119, 0)]:
        made = SlowRig(linear, bounds=limits(objectives=Objectives(itl_s=itl_s)))
        made.submit(replace(ask("r", 5, 6), sampling=replace(greedy(6), n=2)))
        made.run()
        assert made.core.attainment.itl.met == met
        assert made.core.attainment.itl.missed == 1 - met


def test_what_fails_has_missed_and_what_is_aborted_is_not_counted() -> None:
    made = rig(Objectives(ttft_s=10.0, itl_s=10.0))
    made.submit(ask("aborted", 5, 9))
    made.step()
    made.core.abort(RequestId("aborted"))
    made.deliver()
    assert made.core.attainment.all.met == made.core.attainment.all.missed == 0
    made.submit(ask("failed", 5, 9))
    made.runner.fails_on = lambda chunks: True
    made.run()
    counts = made.core.attainment
    assert (counts.ttft.missed, counts.itl.missed, counts.all.missed) == (1, 1, 1)


def test_a_prefill_alone_is_nobodys_goodput() -> None:
    made = rig(Objectives(ttft_s=10.0))
    made.submit(ask("p", 5, 9, work=Work.PREFILL))
    made.run()
    assert made.core.attainment.all.met == 0


def test_without_objectives_nothing_is_counted() -> None:
    made = FakeRig()
    made.submit(ask("r", 5, 3))
    made.run()
    counts = made.core.attainment
    assert not counts.enabled
    assert (counts.all.met, counts.all.missed) == (0, 0)


@pytest.mark.parametrize(("ttft_s", "itl_s", "expected"), [(1.0, None, (1, 0, 1)), (None, 0.1, (0, 1, 1))])
def test_an_objective_that_is_not_set_is_not_counted(
    ttft_s: float | None, itl_s: float | None, expected: tuple[int, int, int]
) -> None:
    counts = Attainment(Objectives(ttft_s, itl_s))
    counts.finished(0.5, 0.05)
    assert (counts.ttft.met, counts.itl.met, counts.all.met) == expected
