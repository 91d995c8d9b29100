"""CURVE on tcp sockets of the handoff (https://rfc.zeromq.org/spec/26/): encryption, and who is admitted.

CURVE alone admits anybody who knows the server's key, which is no secret here: it travels with the endpoint. So a ZAP
authenticator compares each client's key with a list (https://rfc.zeromq.org/spec/27/).
"""

import re
import time
from collections.abc import Callable, Collection

import structlog
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85

from common.errors import HandoffRefusedError

#: What an encrypted frame is longer than its content: command name, nonce, authenticator and flags, and room to spare.
OVERHEAD_BYTES = 64
#: Of ZAP: what the client asks to be let into. Any name would do, but none switches ZAP off.
_DOMAIN = "handoff"
#: Strangers may come as often as they like; the log hears of them this often at most.
LOG_INTERVAL_S = 10.0

_PARAMETER = "?curve="
_KEY = re.compile(r"[0-9a-f]{64}")

log = structlog.get_logger()


def with_key(address: str, key: str) -> str:
    """The endpoint tcp://HOST:PORT of a server with that public key, in hexadecimal."""
    return f"{address}{_PARAMETER}{key}"


def split_key(endpoint: str) -> tuple[str, str | None]:
    """What to connect to, and the public key of the server there, if it has one. Raises HandoffRefusedError."""
    address, found, key = endpoint.partition(_PARAMETER)
    if found and not (_KEY.fullmatch(key) and address.startswith("tcp://")):
        raise HandoffRefusedError(f"{endpoint!r} is no handoff endpoint; it has no public key of 64 hexadecimal digits")
    return address, key if found else None


def serve(socket: "zmq.Socket[bytes]") -> str:
    """Has a socket that is not bound yet admit nobody without CURVE; returns its public key.

    The key is new with each call and never stored, so that it cannot be taken from a file.
    """
    public, secret = zmq.curve_keypair()
    _make_room(socket)
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, secret)
    socket.set(zmq.ZAP_DOMAIN, _DOMAIN.encode())
    # Without an authenticator nobody gets in, instead of everybody.
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return z85.decode(public).hex()


def call(socket: "zmq.Socket[bytes]", server_key: str, secret_key: str) -> None:
    """Has a socket that is not connected yet show the public half of `secret_key`, and insist on the server's key."""
    secret = z85.encode(bytes.fromhex(secret_key))
    _make_room(socket)
    socket.set(zmq.CURVE_SERVERKEY, z85.encode(bytes.fromhex(server_key)))
    socket.set(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
    socket.set(zmq.CURVE_SECRETKEY, secret)


def _make_room(socket: "zmq.Socket[bytes]") -> None:
    """The largest frame is as large as without encryption."""
    socket.set(zmq.MAXMSGSIZE, int(socket.get(zmq.MAXMSGSIZE)) + OVERHEAD_BYTES)


class Admission:
    """Lets those in whose public key, in hexadecimal, `admitted` names at that moment; until it is closed.

    To be made before a socket of its context is bound.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", admitted: Callable[[], Collection[str]]) -> None:
        #: Clients that were sent away for their key. Those that do not speak CURVE do not get so far.
        self.num_refused = 0
        self._admitted = admitted
        self._logged_at = float("-inf")
        self._authenticator = AsyncioAuthenticator(zmq.asyncio.Context(context))
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, self)

    def callback(self, domain: str, key: bytes) -> bool:
        """The authenticator's question; keys come in Z85."""
        public = z85.decode(key).hex()
        if public in self._admitted():
            return True
        self.num_refused += 1
        now = time.monotonic()
        if now - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = now
            log.warning("handoff_client_refused", key=public, refused=self.num_refused, hint="its keys do not fit")
        return False

    def close(self) -> None:
        """Nobody new gets in."""
        self._authenticator.stop()
