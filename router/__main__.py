"""`python -m router`: the HTTP API in front of prefill and decode workers."""

import asyncio
import sys

from common.config import RouterSettings
from common.program import run_program
from common.settings_loader import load_settings


def main() -> int:
    """0 after a drain. Raises StartupError when the router cannot start, WorkerLostError when a process failed."""
    settings = load_settings(RouterSettings, sys.argv[1:], prog="python -m router")
    # Late, so that --help and a wrong flag answer at once.
    from common.log import configure_logging

    configure_logging(settings, process="router")
    if settings.router_processes > 1:
        from router.processes.parent import serve_in_processes

        asyncio.run(serve_in_processes(settings))
    else:
        from router.server import serve

        asyncio.run(serve(settings))
    return 0


if __name__ == "__main__":
    sys.exit(run_program("router", main))
