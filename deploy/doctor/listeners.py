"""Who listens on a port of this machine. Linux tells, of other users' processes only root."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")

#: State of a listening socket in /proc/net/tcp.
_LISTEN = "0A"

#: Of a command line, so that the port stays in sight.
_MAX_COMMAND_CHARS = 60


@dataclass(frozen=True, slots=True)
class Listener:
    """`command`: the beginning of its command line."""

    pid: int
    command: str


def listener(port: int, *, root: Path = _ROOT) -> Listener | None:
    """Some process that listens on the port, at whatever address; None: there is none, or it is not told.

    `root`: where /proc is.
    """
    links = {f"socket:[{inode}]" for inode in _inodes(port, root)}
    if not links:
        return None
    for folder in root.glob("proc/[0-9]*"):
        if links & set(_links(folder / "fd")):
            return Listener(int(folder.name), _command(folder / "cmdline"))
    return None


def _inodes(port: int, root: Path) -> Iterator[str]:
    """Of listening sockets: columns 2, 4 and 10 are the local address, HEX:HEX, the state and the inode."""
    for name in ("proc/net/tcp", "proc/net/tcp6"):
        try:
            lines = (root / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for columns in map(str.split, lines):
            if columns[3] == _LISTEN and int(columns[1].rpartition(":")[2], 16) == port:
                yield columns[9]


def _links(folder: Path) -> Iterator[str]:
    """What the process has open; nothing where we may not look, or it has ended."""
    try:
        for each in folder.iterdir():
            yield str(each.readlink())
    except OSError:
        return


def _command(path: Path) -> str:
    try:
        program, *arguments = path.read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return "a program"
    command = " ".join([Path(program).name, *arguments])
    return command if len(command) <= _MAX_COMMAND_CHARS else f"{command[:_MAX_COMMAND_CHARS]}…"
