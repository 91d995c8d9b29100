"""`moerelay keys init|rotate|show`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from common.arguments import ArgumentParser
from common.errors import ConfigError
from common.security.key_file import KeyRole, exposed
from deploy.arguments import integer
from deploy.keys.authority import VALID_DAYS, Authority
from deploy.keys.certificates import certificate_fingerprint
from deploy.keys.folder import ADMIN_KEYS, API_KEYS, AUTHORITY, ROLES, KeyFolder

#: Bytes of a SHA-256 that are shown: enough to tell keys apart.
_FINGERPRINT_BYTES = 8

#: A century: X.509 knows no year beyond 9999.
_MOST_DAYS = 36_525

_WHERE_TO = """\
  router.json      for the router:           --cluster-key-file
  prefill.json     for prefill workers:      --cluster-key-file
  decode.json      for decode workers:       --cluster-key-file
  api-keys.txt     for the router:           --api-key-file
  admin-keys.txt   for the router:           --admin-key-file
  authority.json   for `moerelay keys` only: leave it here"""


def command_line() -> ArgumentParser:
    """The flags of this command."""
    parser = ArgumentParser("moerelay keys", "Make, rotate and show the keys of a cluster that spans machines.")
    parser.add_argument(
        "action",
        choices=("init", "rotate", "show"),
        help="init: make all; rotate: put the next generation to use, while the current one stays good until the next "
        "rotation, or write what an interrupted one has left out; show: fingerprints, no secrets",
    )
    parser.add_argument("folder", type=Path, help="where the keys of this cluster lie")
    parser.add_argument(
        "--days",
        type=integer(1, _MOST_DAYS),
        default=VALID_DAYS,
        help="certificates are good for (default: %(default)s)",
    )
    parser.add_argument("--if-missing", action="store_true", help="of init: leave keys that are there as they are")
    return parser


def main(argv: Sequence[str]) -> int:
    """Raises ConfigError if the folder cannot be used."""
    arguments = command_line().parse_args(argv)
    folder, now = KeyFolder(arguments.folder), datetime.now(UTC)
    run: Mapping[str, Callable[[], Iterator[str]]] = {
        "init": lambda: init(folder, now, arguments.days, if_missing=arguments.if_missing),
        "rotate": lambda: rotate(folder, now, arguments.days),
        "show": lambda: show(folder, now),
    }
    print("\n".join(run[arguments.action]()))
    return 0


def init(folder: KeyFolder, now: datetime, days: int, *, if_missing: bool = False) -> Iterator[str]:
    """Makes everything; what to do with it."""
    if if_missing and folder.exists():
        yield f"{folder.path} holds the keys of cluster {folder.authority().cluster} already"
        return
    authority = Authority.new(now=now, days=days)
    folder.write_new(authority, now=now, days=days)
    yield f"made the keys of cluster {authority.cluster} in {folder.path}"
    yield _WHERE_TO


def rotate(folder: KeyFolder, now: datetime, days: int) -> Iterator[str]:
    """Makes everything one generation newer; what to do with it.

    If files lack the current generation, they only get that: processes with older ones would not believe a newer one.
    """
    current = folder.authority()
    if behind := folder.behind(current):
        folder.write(current, now=now, days=days)
        yield f"{', '.join(behind)} of {folder.path} lacked generation {current.current.number}: all files have it now"
        yield "no newer generation was made; give every process its file, and run this again to make one"
        return
    authority = current.rotated(now=now, days=days)
    folder.write(authority, now=now, days=days)
    yield f"generation {authority.current.number} of cluster {authority.cluster} is in use in {folder.path}"
    yield "give every process its new file, in any order; none has to be started again"
    yield f"generation {authority.current.number - 1} is accepted until the next rotation: let all have theirs before"


def show(folder: KeyFolder, now: datetime) -> Iterator[str]:
    """What there is."""
    authority = folder.authority()
    yield f"cluster {authority.cluster}, generation {authority.current.number}"
    for each in authority.believed:
        use = {authority.current.number: "current", authority.next.number: "next"}.get(each.number, "last")
        yield f"generation {each.number} ({use})"
        yield f"  authority of workers  {certificate(each.workers.certificate)}"
        yield f"  authority of routers  {certificate(each.routers.certificate)}"
        yield f"  handoff key           {fingerprint(bytes.fromhex(each.handoff_public_key))}"
        yield f"  API key               {fingerprint(each.api_key.encode())}"
        yield f"  administrator's key   {fingerprint(each.admin_key.encode())}"
    for role in ROLES:
        yield f"{role}.json: {_file(folder, role, authority, now)}"
    for name in (AUTHORITY, *(f"{role}.json" for role in ROLES), API_KEYS, ADMIN_KEYS):
        if warning := exposed(folder.path / name):
            yield f"warning: {warning}"


def _file(folder: KeyFolder, role: KeyRole, authority: Authority, now: datetime) -> str:
    try:
        keys = folder.key_file(role)
    except ConfigError as error:
        return error.message
    behind = "" if keys.generation == authority.current.number else "; behind: run `moerelay keys rotate`"
    return (
        f"generation {keys.generation}, certificate {certificate(keys.certificate)}, "
        f"ends on {keys.expires} ({keys.days_left(now)} days){behind}"
    )


def certificate(pem: str) -> str:
    """Its fingerprint."""
    return certificate_fingerprint(pem)[:_FINGERPRINT_BYTES].hex()


def fingerprint(key: bytes) -> str:
    """Of a key, which does not tell it."""
    return sha256(key).digest()[:_FINGERPRINT_BYTES].hex()
