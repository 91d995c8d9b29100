"""Progress of loading where there is no terminal to draw on."""

from structlog.testing import capture_logs

from common.model.progress import LoggedProgress, loading_progress


def test_a_line_every_two_seconds() -> None:
    times = iter([10.0, 11.0, 12.0, 13.9, 14.5, 15.0])
    with capture_logs() as lines:
        progress = LoggedProgress(200, clock=lambda: next(times))
        for _ in range(5):
            progress.advance(40)
    assert [(line["event"], line["percent"], line["loaded_bytes"]) for line in lines] == [
        ("loading", 40, 80),
        ("loading", 80, 160),
    ]


def test_what_loads_at_once_logs_nothing() -> None:
    with capture_logs() as lines, loading_progress(100, enabled=True) as advance:
        advance(100)
    assert lines == []
