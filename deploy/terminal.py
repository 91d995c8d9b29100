"""What commands print to people."""

from rich.console import Console


class _Stdout(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the program here; `run_program` does."""
        raise  # noqa: PLE0704  (rich calls this while it handles the error)


def stdout() -> Console:
    """Plain text on stdout, coloured on a terminal unless NO_COLOR is set. Lines are not wrapped."""
    return _Stdout(highlight=False, soft_wrap=True)
