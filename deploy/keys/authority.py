"""What all keys of a cluster are made from: three generations of secrets, of which the middle one is in use.

Every process believes what the last, the current and the next generation shows, and shows the current one. So files of
two neighbouring generations work together, in whichever order processes get theirs, and nothing has to be done at once.
"""

import secrets
from datetime import datetime
from typing import Self

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from common.errors import ConfigError
from common.security.grpc_keys import ROUTER_NAME, WORKER_NAME
from common.security.key_file import FORMAT, KeyFile, KeyRole
from deploy.keys.certificates import Signed, expires, new_authority, sign

#: Of certificates, unless told otherwise: keys are replaced by rotation, not because a date has passed unnoticed.
VALID_DAYS = 3650


class Generation(msgspec.Struct, frozen=True):
    """The secrets of one."""

    number: int
    #: Sign certificates of workers, which routers believe; and of routers, which workers believe.
    workers: Signed
    routers: Signed
    #: CURVE key of all prefill workers, in hexadecimal.
    handoff_secret_key: str
    api_key: str
    admin_key: str

    @classmethod
    def new(cls, cluster: str, number: int, *, now: datetime, days: int) -> Self:
        return cls(
            number=number,
            workers=new_authority(f"moerelay {cluster} workers {number}", now=now, days=days),
            routers=new_authority(f"moerelay {cluster} routers {number}", now=now, days=days),
            handoff_secret_key=X25519PrivateKey.generate().private_bytes_raw().hex(),
            api_key=f"mr-{cluster}-{secrets.token_urlsafe(32)}",
            admin_key=f"mr-admin-{cluster}-{secrets.token_urlsafe(32)}",
        )

    @property
    def handoff_public_key(self) -> str:
        """In hexadecimal. CURVE's keys are those of X25519."""
        private = X25519PrivateKey.from_private_bytes(bytes.fromhex(self.handoff_secret_key))
        return private.public_key().public_bytes_raw().hex()

    def __repr__(self) -> str:
        """Without secrets."""
        return f"Generation({self.number})"


class Authority(msgspec.Struct, frozen=True):
    """Of one cluster. `last` is None until the first rotation."""

    format: int
    cluster: str
    last: Generation | None
    current: Generation
    next: Generation

    @classmethod
    def new(cls, *, now: datetime, days: int = VALID_DAYS) -> Self:
        """With a random name."""
        cluster = secrets.token_hex(4)
        first, second = (Generation.new(cluster, number, now=now, days=days) for number in (1, 2))
        return cls(format=FORMAT, cluster=cluster, last=None, current=first, next=second)

    @classmethod
    def decode(cls, text: bytes, name: str) -> Self:
        """Raises ConfigError if it is none."""
        try:
            authority = msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{name} was not made by `moerelay keys`: {error}") from error
        if authority.format != FORMAT:
            raise ConfigError(f"{name} has format {authority.format}, and this version knows {FORMAT}")
        return authority

    def rotated(self, *, now: datetime, days: int = VALID_DAYS) -> Self:
        """One generation later."""
        following = Generation.new(self.cluster, self.next.number + 1, now=now, days=days)
        return type(self)(
            format=self.format, cluster=self.cluster, last=self.current, current=self.next, next=following
        )

    @property
    def believed(self) -> tuple[Generation, ...]:
        """All that there are, the oldest first."""
        return (*([self.last] if self.last else []), self.current, self.next)

    def key_file(self, role: KeyRole, *, now: datetime, days: int = VALID_DAYS) -> KeyFile:
        """With a certificate made for it now."""
        is_router = role == "router"
        signer = self.current.routers if is_router else self.current.workers
        shown = sign(signer, ROUTER_NAME if is_router else WORKER_NAME, server=not is_router, now=now, days=days)
        return KeyFile(
            format=FORMAT,
            cluster=self.cluster,
            role=role,
            generation=self.current.number,
            expires=min(expires(shown.certificate), expires(signer.certificate)),
            certificate=shown.certificate,
            private_key=shown.private_key,
            trusted=tuple((each.workers if is_router else each.routers).certificate for each in self.believed),
            handoff_secret_key=self.current.handoff_secret_key if role == "prefill" else None,
            handoff_clients=tuple(each.handoff_public_key for each in self.believed) if role == "decode" else (),
        )
