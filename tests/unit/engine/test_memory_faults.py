"""Memory that runs out while blocks are copied or prepared: who asked for it fails, and everybody else goes on."""

from common.errors import InternalError
from common.sampling import SamplingParams
from tests.unit.engine.crowded import assert_solo, prompt_of, watched_rig
from tests.unit.engine.rig import greedy, make_request


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
    assert rig.core.stats.preemptions == 1
    assert isinstance(b.error, InternalError)
    assert_solo(a)
    rig.assert_baseline()
