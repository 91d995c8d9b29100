"""Memory that runs out while blocks are copied or prepared: who asked for it fails, and everybody else goes on."""

from collections.abc import Sequence

import pytest

from common.errors import InternalError
from common.sampling import SamplingParams
from tests.unit.engine.crowded import assert_solo, prompt_of, rig_of, watched_rig
from tests.unit.engine.rig import RigPair, greedy, make_request


def test_whoever_waits_behind_one_that_fails_comes_in_at_once() -> None:
    """One seat, whose owner fails: no command is needed for the next one."""
    rig, store = watched_rig(8, seats=1)
    store.failures["clear_blocks"] = [RuntimeError("out of memory")]
    a, b = (rig.submit(make_request(name, prompt_of(4, i), greedy(3))) for i, name in enumerate("ab"))
    assert rig.step()
    assert isinstance(a.error, InternalError)
    rig.run()
    assert_solo(b)
    rig.assert_baseline()


def test_whoever_waits_behind_one_that_cannot_grow_comes_in_at_once() -> None:
    rig, store = watched_rig(8, seats=1)
    a, b = (rig.submit(make_request(name, prompt_of(4, i), greedy(9))) for i, name in enumerate("ab"))
    rig.step()
    store.failures["clear_blocks"] = [RuntimeError("out of memory")]
    assert rig.step()
    assert isinstance(a.error, InternalError)
    assert b.tokens
    rig.run()
    assert_solo(b)
    rig.assert_baseline()


def test_what_cannot_be_saved_fails_alone() -> None:
    rig, store = watched_rig(9)
    a = rig.submit(make_request("a", prompt_of(6, 0), greedy(14)))
    b = rig.submit(make_request("b", prompt_of(6, 1), SamplingParams(14, n=2, temperature=1.5, ignore_eos=True)))
    rig.step()
    store.failures["read_kv"] = [RuntimeError("out of memory")]
    rig.run()
    assert (rig.core.stats.preemptions, rig.core.stats.swapped_tokens) == (0, 0)
    assert isinstance(b.error, InternalError)
    assert_solo(a)
    rig.assert_baseline()


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("read_kv", ["copying the KV of 12 positions to host memory", "--swap-space"]),
        ("write_kv", ["preparing 4 KV blocks", "--kv-cache-memory"]),
        ("clear_blocks", ["preparing", "--kv-cache-memory"]),
    ],
)
def test_memory_that_is_out_ends_one_request(error: type[Exception], method: str, words: Sequence[str]) -> None:
    """While "b" is preempted and comes back, or "a" grows; torch and NumPy raise different errors."""
    rig, store = watched_rig(7)
    a, b = (rig.submit(make_request(name, prompt_of(6, i), greedy(14))) for i, name in enumerate("ab"))
    rig.step()
    rig.core.reset_prefix_cache()  # or what comes back is shared with it, and not written
    store.failures[method] = [error("no memory\nfor anybody")]
    rig.run()
    failed = b if method != "clear_blocks" else a
    assert isinstance(failed.error, InternalError)
    assert all(word in failed.error.message for word in (*words, f"({error.__name__}: no memory)"))
    assert_solo(a if failed is b else b)
    rig.assert_baseline()


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_memory_that_is_out_ends_one_handoff(error: type[Exception]) -> None:
    """The prompt's tail is copied for its second choice while the command runs, not in a step."""
    rig, store = watched_rig(9)
    pair = RigPair(rig_of(16), rig)
    request = make_request("a", prompt_of(6), SamplingParams(4, n=2, temperature=1.5), start=None)
    got, other = pair.start(request), rig.submit(make_request("other", prompt_of(3), greedy(4)))
    rig.step()
    prefilled = pair.prefill.transcripts[request.request_id]
    pair.prefill.run()
    store.failures["read_kv"] = [error("no memory")]
    rig.core.commit_handoff(request.request_id, prefilled.first_tokens)
    rig.deliver()
    assert isinstance(got.error, InternalError)
    assert "handoff" in got.error.message
    rig.run()
    assert_solo(other)
    rig.assert_baseline()
