"""Files that are read while a process serves, and what else may have their name."""

import os
from pathlib import Path

from common.small_file import MAX_FILE_BYTES, read_small_file


def reason(path: Path) -> str | None:
    try:
        read_small_file(path)
    except OSError as error:
        return error.strerror
    return None


def test_a_regular_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(MAX_FILE_BYTES))
    (tmp_path / "link").symlink_to(path)
    assert read_small_file(tmp_path / "link") == bytes(MAX_FILE_BYTES)
    path.write_bytes(bytes(MAX_FILE_BYTES + 1))
    assert reason(path) == "it has more than 1048576 bytes"


def test_what_else_there_may_be(tmp_path: Path) -> None:
    """Nobody writes into the FIFO: to open it as usual would take for ever."""
    os.mkfifo(tmp_path / "fifo")
    assert reason(tmp_path / "fifo") == "it is no regular file"
    assert reason(Path("/dev/zero")) == "it is no regular file"
    assert reason(tmp_path) == "Is a directory"
    assert reason(tmp_path / "missing") == "No such file or directory"
