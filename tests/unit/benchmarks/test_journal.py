"""A run that was cut off goes on where it was."""

from pathlib import Path

from benchmarks.journal import Journal
from benchmarks.table import Quantity, Samples

TIME = Quantity("time", "s", higher_is_better=False)


def one(value: float) -> Samples:
    samples = Samples()
    samples.add("ours", TIME, value)
    return samples


def test_rounds_come_back_in_their_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "new" / "journal", "commit a")
    for number in (1, 0):
        journal.record("serving", number, one(10.0 + number))
    again = Journal(tmp_path / "new" / "journal", "commit a")
    assert [again.has("serving", number) for number in (0, 1, 2)] == [True, True, False]
    assert again.samples("serving").values("ours", "time") == [10.0, 11.0]
    assert not again.samples("mixed").conditions


def test_another_subject_begins_anew(tmp_path: Path) -> None:
    Journal(tmp_path / "journal", "commit a").record("serving", 0, one(1.0))
    assert not Journal(tmp_path / "journal", "commit b").has("serving", 0)
    assert not Journal(tmp_path / "journal", "commit a").has("serving", 0)


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, "commit a")
    journal.record("serving", 0, one(1.0))
    journal.record("serving", 1, one(2.0))
    path.write_text(path.read_text()[:-20])
    again = Journal(path, "commit a")
    assert not again.has("serving", 1)
    again.record("serving", 1, one(3.0))
    assert Journal(path, "commit a").samples("serving").values("ours", "time") == [1.0, 3.0]


def test_a_finished_run_leaves_nothing(tmp_path: Path) -> None:
    Journal(tmp_path / "journal", "commit a").finish()
    assert not (tmp_path / "journal").exists()
