"""How far something is, for whoever waits at a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Takes what was done since the last call.
Advance = Callable[[int], None]


def on_terminal() -> bool:
    """Whether a person watches stderr. rich by itself would believe FORCE_COLOR, and draw bars into files."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def progress_bar(title: str, total: int | None, *, in_bytes: bool = False) -> Iterator[Advance]:
    """A bar on stderr that vanishes in the end, plain if NO_COLOR is set; nothing where stderr is no terminal.

    Lines that are written to `sys.stderr` meanwhile stand above it, as long as they are.

    `total`: what `Advance` is called with, in all; None if nobody knows.
    """
    if not on_terminal():
        yield lambda count: None
        return
    from rich.console import Console  # late: most runs draw nothing
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    count = DownloadColumn() if in_bytes else MofNCompleteColumn()
    known = () if total is None else (count, TimeRemainingColumn())
    columns = (TextColumn(title), BarColumn(), *known, TimeElapsedColumn())
    # Soft: the terminal wraps long lines, and whoever copies them gets them whole.
    console = Console(stderr=True, soft_wrap=True)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.advance(task, done)
