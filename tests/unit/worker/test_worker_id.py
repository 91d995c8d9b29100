"""What workers are called by default: metrics of a cluster carry the name, so no two may have the same."""

import socket

import pytest

from common.worker.process import default_worker_id


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:7002", "decode-7002"),
        ("localhost:7002", "decode-7002"),
        ("[::1]:7002", "decode-7002"),
        ("172.18.0.4:7002", "decode-172.18.0.4:7002"),
        ("d0.example:7002", "decode-d0.example:7002"),
        ("[2001:db8::4]:7002", "decode-[2001:db8::4]:7002"),
        ("0.0.0.0:7002", f"decode-{socket.gethostname()}:7002"),
        ("[::]:7002", f"decode-{socket.gethostname()}:7002"),
    ],
)
def test_the_name_tells_machines_apart(address: str, expected: str) -> None:
    assert default_worker_id("decode", address) == expected
