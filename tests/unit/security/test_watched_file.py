"""Keys that change while a process runs."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest
from structlog.testing import capture_logs

from common.errors import ConfigError
from common.security.watched_file import WatchedFile, keep_reading


def read(path: Path) -> str:
    """Refuses files that are empty or not there."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read") from error
    if not text:
        raise ConfigError(f"{path.name} is empty")
    return text


def write(path: Path, text: str, at: int) -> None:
    """In place, as of second `at`."""
    path.write_text(text)
    os.utime(path, (at, at))


def test_a_change_is_read_once_it_stands_still(tmp_path: Path) -> None:
    path, told = tmp_path / "keys", list[str]()
    write(path, "old", 1)
    file = WatchedFile(path, read, told.append)
    file.poll()
    assert (file.value, told) == ("old", [])
    write(path, "ne", 2)
    file.poll()
    write(path, "new", 3)
    file.poll()
    assert file.value == "old", "somebody may still be writing"
    file.poll()
    file.poll()
    assert (file.value, told) == ("new", ["new"])


def test_another_file_of_the_same_name(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path, "old", 1)
    file = WatchedFile(path, read)
    write(tmp_path / "other", "new", 1)
    (tmp_path / "other").replace(path)
    file.poll()
    file.poll()
    assert file.value == "new"


def test_what_breaks_later_changes_nothing(tmp_path: Path) -> None:
    path, told = tmp_path / "keys", list[str]()
    write(path, "old", 1)
    file = WatchedFile(path, read, told.append)
    with capture_logs() as logs:
        write(path, "", 2)
        for _ in range(5):
            file.poll()
        path.unlink()
        for _ in range(5):
            file.poll()
        assert (file.value, told) == ("old", [])
        write(path, "old", 3)
        for _ in range(5):
            file.poll()
        assert (file.value, told) == ("old", []), "it says what it said before"
        write(path, "new", 4)
        file.poll()
        file.poll()
    assert told == ["new"]
    assert [(entry["event"], entry.get("reason")) for entry in logs] == [
        ("key_file_unusable", "keys is empty"),
        ("key_file_unusable", "keys cannot be read"),
        ("key_file_read_again", None),
    ]


def test_it_must_be_there_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keys cannot be read"):
        WatchedFile(tmp_path / "keys", read)


class Looked:
    """A file that is looked at; with `answer`, only once that is set. `often`: twenty times."""

    def __init__(self, name: str, answer: Event | None = None) -> None:
        self.path = Path(name)
        self.num_looks = 0
        self.often = Event()
        self._answer = answer

    def look(self) -> Callable[[], None]:
        if self._answer:
            self._answer.wait()
        return self._count

    def _count(self) -> None:
        self.num_looks += 1
        if self.num_looks == 20:
            self.often.set()


async def test_a_file_on_a_mount_that_hangs_holds_up_nothing_else() -> None:
    """Neither the event loop nor the other file; and one thread waits for it, not one more every second."""
    answer = Event()
    hanging, other = Looked("/hanging/keys", answer), Looked("/keys")
    complaint = "/hanging/keys cannot be looked at: no answer for 0.02 s; does its mount hang?"
    with capture_logs() as logs:

        def complaints() -> list[str]:
            # On a busy machine a thread of the other file may be late, too.
            return [entry["reason"] for entry in logs if "/hanging/" in entry["reason"]]

        reading = asyncio.create_task(keep_reading([hanging, other], interval_s=0.001, timeout_s=0.02))
        async with asyncio.timeout(30):
            while not complaints():  # noqa: ASYNC110 - the log has no event
                await asyncio.sleep(0.001)
        assert await asyncio.to_thread(other.often.wait, 30)
        assert (hanging.num_looks, complaints()) == (0, [complaint])
    answer.set()
    assert await asyncio.to_thread(hanging.often.wait, 30)
    reading.cancel()
