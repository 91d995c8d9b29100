"""`python -m prefill_worker --help`."""

import sys
from typing import TYPE_CHECKING

from common.config import PrefillSettings
from common.worker.entry import run_worker

if TYPE_CHECKING:
    from common.worker.entry import Serve


def _load_serve() -> "Serve[PrefillSettings]":
    from prefill_worker.process import serve

    return serve


if __name__ == "__main__":
    sys.exit(run_worker(PrefillSettings, "prefill_worker", sys.argv[1:], _load_serve))
