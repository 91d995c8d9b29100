"""Types of setting values: how sizes, ports, addresses and durations are written."""

import re
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode

from common.cpu_list import format_cpus, parse_cpus

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)")
_DURATION = re.compile(r"([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)\s*(ms|s)")
_PORTS = range(1, 65_536)
_DNS_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_THREADS = re.compile(r"[1-9][0-9]{0,5}(:[1-9][0-9]{0,5})?")


def parse_bytes(value: object) -> object:
    """'1GiB' → 1073741824; numbers pass through. Raises ValueError for anything that is no size."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write a number with B, KiB, MiB or GiB, such as 1GiB")
    return int(Fraction(match[1]) * _UNITS[match[2]])


def _parse_duration(value: object) -> object:
    """'50ms' → 0.05, '2s' → 2.0; numbers of seconds pass through. Raises ValueError for anything that is neither."""
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value.strip().lower())
    if match is None:
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"{value!r} is not a duration; write a number with ms or s, such as 50ms") from None
    return float(match[1]) / (1000 if match[2] == "ms" else 1)


def _split(value: object) -> object:
    """'a:1,b:2' → ['a:1', 'b:2']; lists pass through."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _host_port(value: str) -> str:
    if "://" in value:
        raise ValueError(f"{value!r} is a URL; write HOST:PORT, without {value.partition('//')[0]}//")
    host, colon, port = value.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) not in _PORTS:
        raise ValueError(f"{value!r} is not HOST:PORT, such as 10.0.0.5:7000")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"{value!r} has an IPv6 address without brackets; write [{host}]:{port}")
    return value


def _worker_source(value: str) -> str:
    scheme, found, rest = value.partition("://")
    if not found:
        return _host_port(value)
    if scheme == "dns":
        _host_port(rest)
    elif scheme not in ("srv", "file"):
        raise ValueError(
            f"{value!r} is no list of workers; write HOST:PORT, dns://HOST:PORT, srv://NAME or file://PATH"
        )
    elif not rest or (scheme == "srv" and not _DNS_NAME.fullmatch(rest)):
        raise ValueError(
            f"{value!r} lacks {'a name of SRV records' if scheme == 'srv' else 'a path'} after {scheme}://"
        )
    return value


def _cpu_list(value: object) -> object:
    """'3, 0-2' → '0-3'; a TOML number is one cpu."""
    return format_cpus(parse_cpus(str(value))) if isinstance(value, str | int) else value


def _thread_split(value: object) -> object:
    """'6:2' and '4' as they are, and so is a TOML number."""
    if not isinstance(value, str | int):
        return value
    if not _THREADS.fullmatch(str(value)):
        raise ValueError(f"{value!r} is neither a number of threads nor two, PREFILL:DECODE, such as 6:2")
    return str(value)


#: At most what an int64 holds: more is a slip of the keyboard, and would overflow far from here.
ByteSize = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0, lt=2**63, examples=["1GiB"])]
#: Where none at all makes sense too.
ByteAmount = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0, lt=2**63, examples=["1GiB"])]
HostPort = Annotated[str, AfterValidator(_host_port)]
#: Where workers are: an address, or who knows the addresses. Not decoded as JSON, which an IPv6 address in brackets
#: would be taken for.
WorkerSources = Annotated[list[Annotated[str, AfterValidator(_worker_source)]], NoDecode, BeforeValidator(_split)]
#: Words, repeated or separated by commas.
Words = Annotated[list[str], NoDecode, BeforeValidator(_split)]
Port = Annotated[int, Field(ge=0, lt=_PORTS.stop)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
#: Seconds, or none.
SecondsOrNone = Annotated[float, Field(ge=0, allow_inf_nan=False)]
#: Which worker takes a prompt; `router/placement/policies.py` has a class for each.
PlacementName = Literal["prefix", "session", "least_loaded", "two_choices", "round_robin"]
#: Seconds, or a number with its unit: 0.05, 50ms, 2s.
Duration = Annotated[float, BeforeValidator(_parse_duration), Field(gt=0, allow_inf_nan=False, examples=["50ms"])]
#: Cpus of this machine, in the spelling of Linux: "0-3,8".
CpuList = Annotated[str, BeforeValidator(_cpu_list)]
#: "4": engine threads of each worker; "6:2": of each prefill worker and of each decode worker.
ThreadSplit = Annotated[str, BeforeValidator(_thread_split)]
