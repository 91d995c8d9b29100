"""Real models of every family under random schedules: whatever happens around a request, it gets its solo run's bytes.

`python -m tests.stress --seed S --round R` plays one round of a failed run again.
"""

import secrets
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.model.families import FAMILIES
from tests.stress.model import StressModel, all_models
from tests.stress.run import play_for, play_rounds

pytestmark = pytest.mark.usefixtures("quiet")

#: Of the long run, over all families and both dtypes.
SECONDS = 600
#: A round takes up to half a minute on a busy machine; and then there is the making of the checkpoints.
TIMEOUT_S = SECONDS + 300

#: Seeds of the short runs, whose eight rounds have everything that is asserted.
SEEDS = {torch.float32: 1, torch.bfloat16: 4}


@pytest.mark.parametrize("dtype", SEEDS, ids=str)
def test_a_short_run_is_exact(dtype: torch.dtype, tmp_path: Path) -> None:
    models = [StressModel(family, dtype, tmp_path) for family in FAMILIES]
    tally = play_rounds(models, SEEDS[dtype], range(len(models)), num_requests=9)
    tally.assert_exact_and_thorough()


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_a_long_run_is_exact(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    seed = secrets.randbelow(2**32)
    print(f"seed {seed}")
    tally = play_for(all_models(list(FAMILIES), tmp_path), seed, SECONDS)
    record_property("summary", f"stress, seed {seed}: {tally}")
    print(tally)
    tally.assert_exact_and_thorough()
