"""Ports that several processes share, and that no second router gets into."""

import socket
import sys
from contextlib import closing

import pytest

from common.config import RouterSettings
from common.errors import StartupError
from router.app import create_app
from router.listener import listening_on
from router.processes.sockets import Address, bind, bind_addresses
from tests.ports import reserved_port

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes cannot share a port there")

#: Of documentation (RFC 5737): no machine has it.
FOREIGN = (socket.AF_INET, ("203.0.113.1", 0))
LOCAL = (socket.AF_INET, ("127.0.0.1", 0))


def test_a_port_that_is_bound_is_taken_before_anybody_listens() -> None:
    with closing(bind("127.0.0.1", 0, 2)) as first:
        assert first.port
        with pytest.raises(StartupError, match=f"cannot listen on 127.0.0.1:{first.port}"):
            bind("127.0.0.1", first.port, 2)


def test_a_port_is_free_again_once_it_is_closed() -> None:
    with reserved_port() as port:
        with closing(bind("127.0.0.1", port, 2)) as first:
            assert first.port == port
        with closing(bind("127.0.0.1", port, 1)) as second:
            assert second.port == port


@pytest.mark.parametrize("addresses", [[FOREIGN, LOCAL], [LOCAL, FOREIGN]])
def test_addresses_that_the_machine_has_not_are_left_out(addresses: list[tuple[int, Address]]) -> None:
    with closing(bind_addresses(addresses, 2)) as port:
        names = [[each.getsockname() for each in mine] for mine in port.sockets]
        assert names == [[("127.0.0.1", port.port)]] * 2


def test_an_address_that_no_machine_has_is_told() -> None:
    with pytest.raises(StartupError, match=r"cannot listen on 203\.0\.113\.1:0"):
        bind("203.0.113.1", 0, 2)


async def test_who_cannot_listen_on_what_is_bound_says_so() -> None:
    """Another program may listen on the same port after both have bound it."""
    with socket.socket() as other, socket.socket() as mine:
        for each in other, mine:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        mine.bind(other.getsockname())
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match=f"cannot listen on 127.0.0.1:{port}"):
            async with listening_on(create_app(RouterSettings()), [mine]):
                pass
