"""`--advertise-address auto`."""

import socket

import pytest

from common.config import PrefillSettings
from common.errors import ConfigError
from common.worker.own_address import advertised, own_address


def test_a_name_that_others_can_reach_counts_first() -> None:
    assert own_address("198.51.100.7") == "198.51.100.7"
    assert own_address("fd00::7") == "fd00::7"


@pytest.mark.parametrize("name", ["localhost", "no-such-name.invalid"])
def test_otherwise_the_route_out_of_here_does(name: str) -> None:
    with pytest.raises(ConfigError, match="--advertise-address auto found no address but loopback"):
        own_address(name, [(socket.AF_INET, "127.0.0.1")])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no route to anywhere")
        expected = probe.getsockname()[0]
    assert own_address(name) == expected


@pytest.mark.parametrize("address", [None, "p0.example"])
def test_other_addresses_are_told_as_they_are(address: str | None) -> None:
    assert advertised(PrefillSettings(model="m", advertise_address=address)) == address
