"""What the parent tells a router process when it starts it: one line of JSON on its stdin, which then stays open."""

import msgspec


class Place(msgspec.Struct, frozen=True):
    """`fds` and `control_fds`: inherited sockets that are bound; the control port's are process 0's alone.

    `settings`: RouterSettings as JSON.
    """

    settings: str
    index: int
    count: int
    #: Of the memory that all processes count in.
    counter_fd: int
    #: Private to the router; its processes' sockets are in it.
    directory: str
    fds: list[int]
    control_fds: list[int]


#: Of the directory's name, to which some letters are added.
DIRECTORY_PREFIX = "moerelay-router-"

#: What a process writes on its stdout once it serves.
READY_LINE = b"ready\n"
#: What it writes instead, before the reason, if it cannot: the parent tells it once for all of them.
REFUSAL = b"refused: "
