"""Files that the operator names and that are read while a process serves: lists of addresses, keys."""

import errno
import os
import stat
from pathlib import Path

#: Of a list of some 40,000 addresses, or of as many keys.
MAX_FILE_BYTES = 2**20


def read_small_file(path: Path) -> bytes:
    """The content of a regular file. It may still take for ever, on a mount that hangs.

    Raises:
        OSError: it cannot be read, is something else (opening a FIFO would wait for whoever writes into it), or has
            more than MAX_FILE_BYTES; `strerror` says which.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MAX_FILE_BYTES} bytes")
    return content


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
