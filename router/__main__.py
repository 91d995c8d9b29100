"""`python -m router`: the HTTP API in front of prefill and decode workers."""

import asyncio
import sys

from common.config import RouterSettings
from common.errors import STARTUP_EXIT_CODE, StartupError, WorkerLostError
from common.settings_loader import load_settings


def main() -> None:
    """Exit code 0 after a drain, 2 when the router cannot start, 1 when one of its processes failed."""
    try:
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
    except StartupError as error:
        print(f"router: error: {error.message}", file=sys.stderr)
        sys.exit(STARTUP_EXIT_CODE)
    except WorkerLostError as error:
        print(f"router: error: {error.message}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
