"""How a program ends: errors as one line on stderr, and an exit code that tells their kind."""

import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress

from common.errors import STARTUP_EXIT_CODE, MoerelayError, StartupError

FAILURE_EXIT_CODE = 1
#: What shells report for programs that SIGINT and SIGPIPE ended.
INTERRUPTED_EXIT_CODE, STDOUT_CLOSED_EXIT_CODE = 130, 141

_STDOUT = "stdout"


def run_program(name: str, run: Callable[[], int]) -> int:
    """Runs a program to its end, with its output written out; returns the exit code.

    2: it could not start, 1: it failed, 130: Ctrl-C, 141: whoever read its stdout has gone, as `| head` does.
    """
    try:
        return _written_out(run)
    except MoerelayError as error:
        print_error(name, error.message)
        return STARTUP_EXIT_CODE if isinstance(error, StartupError) else FAILURE_EXIT_CODE
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    except MemoryError as error:
        print_error(name, f"memory is out: {error or 'close other programs, or take a machine with more'}")
    except OSError as error:
        if isinstance(error, BrokenPipeError) and (error.filename == _STDOUT or _nobody_reads_stdout()):
            return STDOUT_CLOSED_EXIT_CODE
        # Nobody has put it in words, but the system names the file and what is wrong with it.
        where = "" if error.filename is None else f"{error.filename}: "
        print_error(name, f"{where}{error.strerror or error}")
    return FAILURE_EXIT_CODE


def _written_out(run: Callable[[], int]) -> int:
    """What stays in the buffer would be written by the interpreter, which prints a traceback where that fails."""
    try:
        return run()
    finally:
        if sys.stdout is not None:  # it is None in a program that was started without
            try:
                sys.stdout.flush()
            except OSError as error:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise OSError(error.errno, error.strerror, _STDOUT) from error


def _nobody_reads_stdout() -> bool:
    """Whether it is a pipe whose other end is closed."""
    if sys.__stdout__ is None or not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(sys.__stdout__.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def print_error(name: str, message: str) -> None:
    """One line on stderr, coloured on a terminal unless NO_COLOR is set; nothing if stderr is closed."""
    from rich.console import Console  # late: a program that does well needs none of it
    from rich.text import Text

    line = Text.assemble(f"{name}: ", ("error", "red"), f": {' '.join(message.split())}")
    with suppress(OSError, SystemExit):
        Console(stderr=True, highlight=False).print(line, soft_wrap=True)
