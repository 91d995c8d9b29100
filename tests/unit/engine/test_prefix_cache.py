"""The prefix cache inside the engine: nothing that it saves shows in an answer, whoever had which part of a prompt."""

from dataclasses import replace

import numpy as np
import pytest

from common.engine.request import EngineRequest, RequestId, Work
from common.errors import HandoffCorruptError
from common.kv.store import slots_of
from common.sampling import SampledToken, SamplingParams
from tests.unit.engine.rig import FakeRig, RigPair, Transcript, greedy, limits, make_request, solo

#: Blocks are of four tokens.
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]


def sampled(n: int, max_tokens: int = 6) -> SamplingParams:
    return SamplingParams(max_tokens, n=n, temperature=1.5, ignore_eos=True, logprobs=2)


def served(rig: FakeRig, request: EngineRequest) -> Transcript:
    """Served to its end, and equal to its solo runs."""
    got = rig.submit(request)
    rig.run()
    for choice in got.all:
        choice.assert_equals(solo(request, choice.choice, weights=rig.runner.weights, version=rig.core.weight_version))
    assert rig.core.check_invariants() == []
    return got


def computed_by(rig: FakeRig, request: EngineRequest) -> int:
    """Prompt tokens that serving the request forwards; the answer tells the rest as cached."""
    before = rig.core.stats.prompt_tokens_computed
    got = served(rig, request)
    computed = rig.core.stats.prompt_tokens_computed - before
    assert [choice.num_cached for choice in got.all] == [len(request.prompt) - computed] * len(got.all)
    return computed


@pytest.mark.parametrize("start", [0, 5, 14, None])
@pytest.mark.parametrize("budget", [1, 3, 16])
@pytest.mark.parametrize(("num_prompt", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (14, 12)])
def test_whole_blocks_are_found_but_never_the_last_token(
    num_prompt: int, hit: int, budget: int, start: int | None
) -> None:
    rig = FakeRig(bounds=limits(max_num_batched_tokens=budget))
    start = None if start is None else min(start, num_prompt)
    request = make_request("a", PROMPT[:num_prompt], greedy(3), start=start)
    assert computed_by(rig, request) == num_prompt
    assert computed_by(rig, request) == num_prompt - hit
    stats = rig.core.stats
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (2 * num_prompt, hit)
    rig.assert_baseline()


def test_the_output_is_found_by_the_next_turn() -> None:
    rig = FakeRig()
    first = make_request("a", PROMPT[:6], greedy(8))
    output = [token.token_id for token in served(rig, first).tokens]
    # Positions [0, 13) were forwarded: three full blocks. The last sampled token never was.
    assert computed_by(rig, make_request("b", [*PROMPT[:6], *output, 1, 2], greedy(4))) == 16 - 12


def test_other_prompts_salts_and_weights_find_nothing() -> None:
    rig = FakeRig()
    request = make_request("a", PROMPT, greedy(3))
    served(rig, request)
    assert computed_by(rig, replace(request, cache_salt="s")) == 14
    assert computed_by(rig, replace(request, cache_salt="s")) == 2
    assert computed_by(rig, replace(request, cache_salt="t")) == 14
    assert computed_by(rig, make_request("b", [1, *PROMPT], greedy(3))) == 15
    rig.core.weight_version = "2"
    assert rig.core.load().kv_blocks_cached == 0
    assert computed_by(rig, request) == 14


def test_off_means_off() -> None:
    rig = FakeRig(prefix_caching=False)
    for _ in range(2):
        assert computed_by(rig, make_request("a", PROMPT, greedy(3))) == 14
    assert (rig.core.stats.prefix_cache_queries, rig.core.load().kv_blocks_cached) == (0, 0)


def test_a_prompt_is_found_while_its_first_owner_still_runs() -> None:
    rig = FakeRig()
    first = rig.submit(make_request("a", PROMPT, greedy(20)))
    rig.step()
    assert computed_by(rig, make_request("b", PROMPT, greedy(3))) == 2
    first.assert_equals(solo(first.request))
    rig.assert_baseline()


def test_blocks_without_rows_do_not_serve_a_request_that_wants_them() -> None:
    rig = FakeRig()
    bare, full = make_request("a", PROMPT, greedy(3), start=None), make_request("b", PROMPT, greedy(3))
    assert computed_by(rig, bare) == 14
    assert computed_by(rig, full) == 14
    assert computed_by(rig, full) == 2  # it put its own blocks in their place
    assert computed_by(rig, bare) == 2


@pytest.mark.parametrize("num_top", [0, 3])
def test_prompt_logprobs_are_all_computed_again(num_top: int) -> None:
    """vllm-project/vllm#8268, #3251, #42245: the second answer equals the first; others find its blocks."""
    rig = FakeRig(bounds=limits(max_num_batched_tokens=5))
    scored = make_request("a", PROMPT, replace(greedy(2), prompt_logprobs=num_top))
    assert computed_by(rig, scored) == 14
    assert computed_by(rig, scored) == 14
    assert rig.core.stats.prefix_cache_queries == 0
    assert computed_by(rig, make_request("b", PROMPT, greedy(2))) == 2


@pytest.mark.parametrize("num_prompt", [7, 8, 9])
def test_choices_share_a_prompt_that_was_cached(num_prompt: int) -> None:
    rig = FakeRig()
    request = make_request("a", PROMPT[:num_prompt], sampled(4))
    computed_by(rig, request)
    assert computed_by(rig, request) == num_prompt - (num_prompt - 1) // 4 * 4
    rig.assert_baseline()


def test_the_output_of_every_choice_is_found() -> None:
    rig = FakeRig()
    got = served(rig, make_request("a", PROMPT[:6], sampled(3, 8)))
    for choice in got.all:
        output = [token.token_id for token in choice.tokens]
        assert computed_by(rig, make_request("b", [*PROMPT[:6], *output, 1, 2], greedy(1))) == 16 - 12


def test_choices_that_wait_for_blocks_find_their_prompt_uncut() -> None:
    """The pool holds one choice, and everything that is only cached has to go for the next one."""
    request = make_request("a", PROMPT, sampled(5))
    rig = FakeRig(num_blocks=-(-request.num_slots // 4))
    for _ in range(3):
        served(rig, request)
    served(rig, make_request("b", PROMPT[2:], sampled(5)))
    rig.assert_baseline()


def test_evicted_blocks_are_ruined_and_computed_again() -> None:
    """A store that poisons: any use of an evicted block would make the logits NaN."""
    rig = FakeRig(num_blocks=6)
    request, other = make_request("a", PROMPT, greedy(3)), make_request("b", PROMPT[::-1], greedy(9))
    served(rig, request)
    served(rig, other)
    assert computed_by(rig, request) > 2
    rig.assert_baseline()


def test_what_becomes_free_behind_an_evicted_block_is_ruined_too() -> None:
    """Two equal prompts at once: the output of the second stands behind the blocks of the first."""
    rig = FakeRig(num_blocks=6)
    rig.submit(make_request("first", PROMPT[:8], greedy(1)))
    rig.submit(make_request("second", PROMPT[:8], greedy(6)))
    rig.run()
    output = slots_of(rig.runner.batches[-1][0].blocks, 8, 12, 4)
    assert rig.core.load().kv_blocks_cached == 3
    rig.submit(make_request("takes all that is free", [1, 2] * 6, greedy(1), work=Work.DECODE))
    rig.step()
    assert not rig.store.read_kv(output).isnan().any()
    rig.submit(make_request("needs one more", [3, 2], greedy(2), work=Work.DECODE))
    rig.step()
    assert rig.core.load().kv_blocks_cached == 1
    assert rig.store.read_kv(output).isnan().all()


def test_a_full_cache_never_keeps_a_request_waiting() -> None:
    rig = FakeRig(num_blocks=5)
    for first in range(10):
        served(rig, make_request("a", [first, *PROMPT], greedy(6)))
    load = rig.core.load()
    assert (load.kv_blocks_used, load.kv_blocks_cached, load.kv_blocks_total) == (0, 5, 5)


def test_whoever_waits_for_blocks_holds_none_of_its_prefix() -> None:
    rig = FakeRig(num_blocks=8)
    served(rig, make_request("warm", PROMPT, greedy(1)))
    rig.submit(make_request("leased", [1, 2] * 8, greedy(2), work=Work.DECODE))
    rig.step()
    waits = rig.submit(make_request("waits", [*PROMPT, *PROMPT[:6]], greedy(12)))
    for _ in range(3):
        rig.step()
    load = rig.core.load()
    assert (load.waiting, load.kv_blocks_used, load.kv_blocks_cached) == (1, 4, 3)
    rig.cancel(RequestId("leased"))
    rig.run()
    assert rig.core.stats.prefix_cache_hits == 12
    waits.assert_equals(solo(waits.request))


def test_a_failed_step_caches_nothing() -> None:
    rig = FakeRig()
    rig.runner.fails_on = lambda chunks: chunks[0].end == len(PROMPT)
    rig.submit(make_request("a", PROMPT, greedy(3)))
    rig.run()
    assert rig.core.load().kv_blocks_cached == 0
    rig.runner.fails_on = lambda chunks: False
    rig.runner.nan_after = lambda chunk: True
    rig.submit(make_request("b", PROMPT, greedy(3)))
    rig.run()
    assert rig.core.load().kv_blocks_cached == 0


def test_what_was_computed_across_a_weight_update_is_never_cached() -> None:
    """Pause mode keep: the sequence goes on with the KV that it has, which belongs to neither label alone."""
    rig = FakeRig()
    straddling = rig.submit(make_request("a", PROMPT, greedy(16)))
    for _ in range(3):
        rig.step()
    rig.core.weight_version, rig.runner.weights = "2", 2
    rig.run()
    assert straddling.finish is not None
    assert rig.core.load().kv_blocks_cached == 0
    output = [token.token_id for token in straddling.tokens]
    assert computed_by(rig, make_request("b", [*PROMPT, *output], greedy(3))) == 30


def test_a_waiting_request_asks_for_the_weights_it_is_admitted_under() -> None:
    rig = FakeRig(bounds=limits(max_num_seqs=1))
    served(rig, make_request("warm", PROMPT, greedy(2)))
    rig.submit(make_request("runs", [1], greedy(9)))
    rig.step()
    waits = rig.submit(make_request("waits", PROMPT, greedy(3)))
    rig.core.abort(RequestId("runs"))
    rig.core.weight_version, rig.runner.weights = "2", 2
    rig.run()
    waits.assert_equals(solo(waits.request, weights=2, version="2"))
    assert computed_by(rig, make_request("again", PROMPT, greedy(3))) == 2


def test_a_reset_frees_what_is_only_cached() -> None:
    rig = FakeRig()
    served(rig, make_request("a", PROMPT, greedy(3)))
    live = rig.submit(make_request("b", PROMPT[:8], greedy(20)))
    rig.step()
    # Four full blocks of the first request's 16 positions; the second one holds the first two.
    assert (rig.core.load().kv_blocks_cached, rig.core.reset_prefix_cache()) == (3, 3)
    assert rig.core.reset_prefix_cache() == 0
    rig.run()
    live.assert_equals(solo(live.request))
    assert computed_by(rig, make_request("c", PROMPT, greedy(3))) == 14


# --- P and D


def hand_over(pair: RigPair, name: str, **fields: object) -> Transcript:
    request = replace(make_request(name, PROMPT, sampled(2)), **fields)  # type: ignore[arg-type]
    got = pair.start(request)
    pair.hand_over(request.request_id)
    pair.decode.run()
    for rig in (pair.prefill, pair.decode):
        assert rig.core.load().kv_blocks_used == 0
        assert rig.core.check_invariants() == []
    return got


@pytest.mark.parametrize("budget", [1, 3, 16])
@pytest.mark.parametrize("start", [0, 6, 13, None])
@pytest.mark.parametrize("on_decode", [0, 4, 9, 14])
@pytest.mark.parametrize("on_prefill", [0, 4, 9, 14])
def test_every_mix_of_sources_is_the_solo_run(on_prefill: int, on_decode: int, start: int | None, budget: int) -> None:
    """vllm-project/vllm#55584: some of the prompt cached on D, some on P, the rest computed."""
    pair = RigPair(FakeRig(bounds=limits(max_num_batched_tokens=budget)), FakeRig())
    for rig, length in ((pair.prefill, on_prefill), (pair.decode, on_decode)):
        if length:
            warm = rig.submit(make_request("warm", PROMPT[:length], greedy(1), start=None if start is None else 0))
            rig.run()
            assert warm.ended
    before = pair.prefill.core.stats.prompt_tokens_computed
    got = hand_over(pair, "a", routing_start=start)
    for choice in got.all:
        choice.assert_equals(solo(got.request, choice.choice))
    whole = {0: 0, 4: 4, 9: 8, 14: 12}
    assert got.num_leased_cached == whole[on_decode]
    assert pair.prefill.core.stats.prompt_tokens_computed - before == 14 - whole[on_prefill]
    assert got.num_cached == whole[on_prefill]


def test_each_row_is_the_one_of_the_kv_in_use() -> None:
    """D holds blocks 0-1, P holds 0-2, the rest is computed on P: told apart by different weights on P and D.

    The handshake would refuse such a pair; here nothing looks at it.
    """
    prefill, decode = FakeRig(weights=1), FakeRig(weights=2)
    for rig, length in ((prefill, 12), (decode, 8)):
        rig.submit(make_request("warm", PROMPT[:length], greedy(1)))
        rig.run()
    assert prefill.core.stats.prompt_tokens_computed == 12
    got = hand_over(RigPair(prefill, decode), "a", sampling=greedy(1))
    assert (got.num_leased_cached, got.num_cached) == (8, 12)
    of_prefill, of_decode = (solo(got.request, weights=weights) for weights in (1, 2))
    assert of_prefill.rows_TLK is not None
    assert of_decode.rows_TLK is not None
    assert (of_prefill.rows_TLK != of_decode.rows_TLK).any(axis=(1, 2)).sum() > 10
    np.testing.assert_array_equal(got.rows_TLK, np.concatenate([of_decode.rows_TLK[:8], of_prefill.rows_TLK[8:]]))
    assert [token.token_id for token in got.tokens] == [token.token_id for token in of_prefill.tokens]


def test_the_handoff_caches_the_prompt_on_decode_and_decoding_the_output() -> None:
    pair = RigPair(FakeRig(), FakeRig())
    first = hand_over(pair, "a", sampling=greedy(8))
    output = [token.token_id for token in first.tokens]
    second = hand_over(pair, "b", prompt=[*PROMPT, *output], sampling=greedy(3))
    second.assert_equals(solo(second.request))
    assert (second.num_leased_cached, second.num_cached) == (20, 12)  # P never had the output


def test_a_handoff_that_breaks_leaves_nothing_in_the_cache() -> None:
    pair = RigPair(FakeRig(bounds=limits(max_num_batched_tokens=4)), FakeRig())
    request = make_request("a", PROMPT, greedy(3))
    pair.start(request)
    pair.prefill.step()
    pair.decode.core.advance_handoff(request.request_id, 8)
    pair.decode.cancel(request.request_id)
    assert pair.decode.core.load().kv_blocks_cached == 0


def test_a_handoff_of_other_weights_is_not_cached_and_continues_no_cached_prompt() -> None:
    """A prefill worker may lag one weight update behind; its prompt is whole, but not of the weights in use here."""
    pair, old = RigPair(FakeRig(weights=1), FakeRig(weights=2)), "1"
    pair.prefill.core.weight_version, pair.decode.core.weight_version = old, "2"
    late = hand_over(pair, "late", sampling=greedy(2))
    assert late.finish is not None
    assert pair.decode.core.load().kv_blocks_cached == 0
    pair.decode.submit(make_request("warm", PROMPT, greedy(1)))
    pair.decode.run()
    mixed = hand_over(pair, "mixed", sampling=greedy(2))
    assert isinstance(mixed.error, HandoffCorruptError)
    assert "cached from weights '2'" in mixed.error.message


def test_shared_blocks_survive_the_end_of_a_lease() -> None:
    rig = FakeRig()
    served(rig, make_request("warm", PROMPT, greedy(1)))
    leased = rig.submit(make_request("a", PROMPT, greedy(4), work=Work.DECODE))
    rig.step()
    assert leased.num_leased_cached == 12
    rig.cancel(RequestId("a"))
    assert computed_by(rig, make_request("b", PROMPT, greedy(3))) == 2


def test_first_tokens_alone_cache_nothing() -> None:
    rig = FakeRig()
    rig.submit(make_request("a", PROMPT, greedy(4), start=None, work=Work.DECODE))
    rig.step()
    rig.core.commit_handoff(RequestId("a"), [SampledToken(5)])
    rig.cancel(RequestId("a"))
    assert rig.core.load().kv_blocks_cached == 0
