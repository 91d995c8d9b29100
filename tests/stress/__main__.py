"""`python -m tests.stress`: random rounds for a while, or one of them again."""

import argparse
import logging
import secrets
import sys
import tempfile
from pathlib import Path

import structlog
import torch

from common.model.families import FAMILIES
from tests.stress.model import all_models
from tests.stress.run import play_for, play_round


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**32))
    parser.add_argument("--seconds", type=float, default=60, help="how long to go on")
    parser.add_argument("--round", type=int, help="play this round only, and show where it fails")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with tempfile.TemporaryDirectory() as directory:
        models = all_models(list(FAMILIES), Path(directory))
        print(f"seed {arguments.seed}", flush=True)
        if arguments.round is not None:
            print(play_round(models, arguments.seed, arguments.round))
            return 0
        tally = play_for(models, arguments.seed, arguments.seconds)
    print(tally)
    print("\n".join(tally.differences))
    return 1 if tally.differences else 0


if __name__ == "__main__":
    sys.exit(main())
