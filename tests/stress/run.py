"""Many random rounds, one model after the other; each can be played again alone."""

import time
from collections.abc import Iterable, Sequence
from itertools import count

from common.errors import MoerelayError
from tests.stress.model import StressModel
from tests.stress.oracle import Oracle
from tests.stress.schedule import Round
from tests.stress.tally import Tally

#: Per round; enough for queues and preemptions, and few enough that a failure can be read.
NUM_REQUESTS = 40


def play_round(models: Sequence[StressModel], seed: int, number: int, num_requests: int = NUM_REQUESTS) -> Tally:
    """The round of that number in the run of that seed.

    Raises:
        AssertionError: something differs.
    """
    model = models[number % len(models)]
    return Round(model, f"{seed}/{number}/{model.name}", num_requests).play(Oracle(model))


def play_for(models: Sequence[StressModel], seed: int, seconds: float) -> Tally:
    """Rounds until the time is over; at least one of each model."""
    end = time.monotonic() + seconds
    tally = Tally()
    for number in count():
        if number >= len(models) and time.monotonic() >= end:
            return tally
        tally.add(try_round(models, seed, number))
    raise AssertionError("counting never ends")


def play_rounds(models: Sequence[StressModel], seed: int, numbers: Iterable[int], num_requests: int) -> Tally:
    """The rounds of these numbers."""
    tally = Tally()
    for number in numbers:
        tally.add(play_round(models, seed, number, num_requests))
    return tally


def try_round(models: Sequence[StressModel], seed: int, number: int) -> Tally:
    """As `play_round`; what is wrong becomes an entry of the tally."""
    again = f"python -m tests.stress --seed {seed} --round {number}"
    try:
        return play_round(models, seed, number)
    except (AssertionError, MoerelayError) as error:
        name = models[number % len(models)].name
        return Tally(rounds=1, differences=[f"{name}: {error} (again: {again})"])
    except Exception as error:
        error.add_note(f"again: {again}")
        raise
