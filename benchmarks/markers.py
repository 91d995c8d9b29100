"""The generated part of a page: what lies between two comments, which Markdown does not show."""

from pathlib import Path


def replace_between(text: str, name: str, generated: str) -> str:
    """`text` with what lies between `<!-- NAME begin -->` and `<!-- NAME end -->` replaced.

    Raises:
        ValueError: there is not exactly one of each, in this order.
    """
    begin, end = f"<!-- {name} begin -->", f"<!-- {name} end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the page must have one line {begin!r} and, below it, one line {end!r}")
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n\n{generated.strip()}\n\n{end}{tail}"


def rewrite(page: Path, name: str, generated: str) -> None:
    """Replaces that part of a file."""
    page.write_text(replace_between(page.read_text(), name, generated))
