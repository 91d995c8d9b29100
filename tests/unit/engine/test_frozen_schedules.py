"""Freezes at random moments among random requests in small pools, with a prefix cache and little or no swap space.

What a freeze lets in may find all of its KV in the cache and be on its way again at once, before its blocks are filled.
"""

import random
from dataclasses import replace

import pytest

from common.sampling import SamplingParams
from tests.unit.engine.rig import FakeRig, Transcript, limits, make_request, solo

#: More steps than any freeze, or any of these runs, has a right to.
FREEZE_STEPS, ALL_STEPS = 500, 5000


def _rig(rng: random.Random) -> tuple[FakeRig, int]:
    """An engine, and the positions that fit into it."""
    num_blocks = rng.randint(8, 16)
    bounds = limits(
        swap_space_bytes=rng.choice([0, 0, 2000]),
        max_num_seqs=rng.choice([4, 8]),
        max_model_len=num_blocks * 4,
        max_num_batched_tokens=rng.choice([4, 9, 16]),
    )
    return FakeRig(num_blocks=num_blocks, bounds=bounds), num_blocks * 4


def _submit(rng: random.Random, rig: FakeRig, name: str, most_choices: int, context: int) -> Transcript:
    """Prompts of three ids, so that many begin alike."""
    prompt = [rng.randrange(3, 6) for _ in range(rng.randint(1, 12))]
    params = SamplingParams(
        max_tokens=rng.randint(2, context - len(prompt)),
        n=rng.randint(1, most_choices),
        temperature=1.5,
        ignore_eos=True,
        seed=rng.randrange(1000),
    )
    return rig.submit(replace(make_request(name, prompt, params), priority=rng.choice([0, 0, -1, 1])))


def _freeze(rig: FakeRig) -> None:
    """As the engine's thread does it, and lets everybody in again."""
    rig.core.close_admission()
    for _ in range(FREEZE_STEPS):
        if not rig.core.has_open_prompts():
            break
        rig.step()
    else:
        raise AssertionError("the freeze never ends")
    rig.core.open_admission()


@pytest.mark.parametrize(("seed", "most_choices"), [(s, 1) for s in range(8)] + [(s, 6) for s in range(22)])
def test_freezes_at_any_moment_change_nothing(seed: int, most_choices: int) -> None:
    rng = random.Random(f"{seed}/{most_choices}")
    rig, context = _rig(rng)
    transcripts = []
    for index in range(rng.randint(2, 5)):
        transcripts.append(_submit(rng, rig, f"r{index}", most_choices, context))
        for _ in range(rng.randint(0, 8)):
            rig.step()
    for _ in range(4):
        for _ in range(rng.randint(0, 20)):
            rig.step()
        _freeze(rig)
    assert sum(rig.step() for _ in range(ALL_STEPS)) < ALL_STEPS
    for choice in (c for transcript in transcripts for c in transcript.all):
        choice.assert_equals(solo(choice.request, choice.choice))
    rig.assert_baseline()
