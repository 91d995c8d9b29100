"""Files that hold all that is needed to compute a request again: the request, and what came out of it both times.

JSON. Bytes are base64, floats of 32 bits are hexadecimal (`float.hex`), so that every bit survives.
"""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Self

import msgspec
import numpy as np

from common.errors import ConfigError
from common.prompt_logprobs import PromptLogprobs, from_bytes
from common.routing.record import RoutingArray
from common.sampling import Finish, SampledToken, SamplingParams, TokenLogprob
from decode_worker.self_check.told import Told

_PREFIX, _SUFFIX = "self-check-", ".json"
#: Until it is whole; of a process that was killed meanwhile it stays.
_UNFINISHED = ".tmp"


@dataclass(frozen=True, slots=True)
class PackedLogprob:
    """`TokenLogprob`."""

    token_id: int
    logprob: str
    rank: int

    @classmethod
    def pack(cls, value: TokenLogprob) -> Self:
        return cls(value.token_id, float(value.logprob).hex(), value.rank)

    def unpack(self) -> TokenLogprob:
        return TokenLogprob(self.token_id, float.fromhex(self.logprob), self.rank)


@dataclass(frozen=True, slots=True)
class PackedToken:
    """`SampledToken`, without its label of weights."""

    token_id: int
    logprob: PackedLogprob | None
    top: tuple[PackedLogprob, ...]
    mask: bytes | None

    @classmethod
    def pack(cls, token: SampledToken) -> Self:
        own = None if token.logprob is None else PackedLogprob.pack(token.logprob)
        return cls(token.token_id, own, tuple(map(PackedLogprob.pack, token.top)), token.mask)

    def unpack(self) -> SampledToken:
        own = None if self.logprob is None else self.logprob.unpack()
        return SampledToken(self.token_id, own, tuple(value.unpack() for value in self.top), self.mask)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Routing rows: little-endian, C order."""

    dtype: Literal["uint8", "uint16", "int32"]
    shape: tuple[int, int, int]
    data: bytes

    @classmethod
    def pack(cls, rows_TLK: RoutingArray) -> Self:
        num_rows, num_layers, top_k = rows_TLK.shape
        little = rows_TLK.astype(rows_TLK.dtype.newbyteorder("<"), order="C", copy=False)
        return msgspec.convert(
            {"dtype": rows_TLK.dtype.name, "shape": (num_rows, num_layers, top_k), "data": little.tobytes()}, cls
        )

    def unpack(self) -> RoutingArray:
        """Raises ValueError if size and shape contradict each other."""
        dtype = np.dtype(self.dtype)
        rows_TLK: RoutingArray = np.frombuffer(self.data, dtype.newbyteorder("<")).reshape(self.shape).astype(dtype)
        return rows_TLK


@dataclass(frozen=True, slots=True)
class PackedTold:
    """`Told`."""

    tokens: tuple[PackedToken, ...]
    rows: PackedRows | None
    finish: Finish
    prompt_logprobs: bytes | None

    @classmethod
    def pack(cls, told: Told) -> Self:
        rows = None if told.rows_TLK is None else PackedRows.pack(told.rows_TLK)
        scores = None if told.prompt_logprobs is None else told.prompt_logprobs.tobytes()
        return cls(tuple(map(PackedToken.pack, told.tokens)), rows, told.finish, scores)

    def unpack(self, num_top: int) -> Told:
        """`num_top`: alternatives per prompt logprob. Raises ValueError."""
        rows_TLK = None if self.rows is None else self.rows.unpack()
        scores: PromptLogprobs | None = None
        if self.prompt_logprobs is not None:
            scores = from_bytes(self.prompt_logprobs, num_top)
        return Told(tuple(token.unpack() for token in self.tokens), rows_TLK, self.finish, scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproducer:
    """One choice whose solo run came out differently."""

    format: Literal[1] = 1
    request_id: str
    choice: int
    #: When that was found, UTC.
    found_at: str
    #: Of the checkpoint, and of what computed it.
    family: str
    fingerprint: str
    weight_version: str
    numerics: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    routing_start: int | None
    #: First differing position by kind.
    differences: Mapping[str, int]
    #: What the client was told.
    served: PackedTold
    #: What the worker's own solo run gave; None: it ended in `solo_error`.
    solo: PackedTold | None
    solo_error: str | None

    @property
    def num_top(self) -> int:
        """Alternatives per prompt logprob."""
        return self.sampling.prompt_logprobs or 0


def read_reproducer(path: Path) -> Reproducer:
    """All of it can be unpacked. Raises ConfigError if the file is none that was written here."""
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=Reproducer)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no file of a self-check: {error}") from error
    try:
        for told in (kept.served, *([kept.solo] if kept.solo else [])):
            told.unpack(kept.num_top)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{path} is damaged; copy it from the worker's --self-check-dir again: {error}") from error
    return kept


class ReproducerFiles:
    """A directory that holds the newest few."""

    def __init__(self, directory: Path, max_files: int) -> None:
        """Raises ConfigError unless files can be written there."""
        self._directory = directory
        self._max_files = max_files
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--self-check-dir {directory}: {error.strerror}; name a directory to write to"
            ) from error
        if not os.access(directory, os.W_OK | os.X_OK):
            raise ConfigError(f"--self-check-dir {directory} cannot be written to by this user; name another directory")

    def write(self, reproducer: Reproducer) -> Path:
        """For its owner's eyes only, because it holds a prompt; older files make room.

        Raises OSError, and leaves nothing.
        """
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
        path = self._directory / f"{_PREFIX}{stamp}-{secrets.token_hex(4)}{_SUFFIX}"
        unfinished = path.with_suffix(_UNFINISHED)
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(reproducer))
            unfinished.rename(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        self._make_room()
        return path

    def _make_room(self) -> None:
        """Names are in the order of time. Other workers may write to the same directory, and remove the same files."""
        files = sorted(self._directory.glob(f"{_PREFIX}*{_SUFFIX}"))
        kept = files[-self._max_files :]
        # What is still being written is newer than what is kept.
        left = [each for each in self._directory.glob(f"{_PREFIX}*{_UNFINISHED}") if each.name < kept[0].name]
        for old in (*files[: -self._max_files], *left):
            old.unlink(missing_ok=True)
