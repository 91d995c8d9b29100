"""The weights of one worker: those in use, those staged beside them, and every label that it has served under."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from common.errors import ConflictError, InvalidRequestError
from common.model.decoder import MoeDecoder
from common.model.loader import LoadedModel
from common.pb import types_pb2

#: Longest label; it travels with every token.
MAX_VERSION_CHARS = 128

#: Loads the checkpoint in a directory; raises InvalidRequestError if it does not fit.
Load = Callable[[Path], Awaitable[LoadedModel]]

#: Computes with other weights from the next step on, and labels the tokens; None: without any.
Use = Callable[[MoeDecoder | None, str], None]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Staged:
    path: Path
    version: str
    loaded: LoadedModel


class Weights:
    """What a worker computes with. `commit`, `release` and `restore` change that, between two steps of the engine.

    Args:
        description: the model with the weights that are loaded.
        path: their checkpoint.
    """

    def __init__(self, description: types_pb2.ModelDescription, path: Path, load: Load, use: Use) -> None:
        self.num_updates = 0
        #: Nothing can be computed, because the weights in use were given back.
        self.released = False
        self._description = description
        self._path = path
        self._load = load
        self._use = use
        self._staged: _Staged | None = None
        #: Number of the newest attempt to stage; an older one comes to nothing.
        self._attempt = 0
        #: Fingerprint of every label that was in use.
        self._used = {description.weight_version: description.fingerprint}

    @property
    def description(self) -> types_pb2.ModelDescription:
        """The model with the weights in use."""
        return self._description

    @property
    def version(self) -> str:
        return self._description.weight_version

    @property
    def staged_version(self) -> str:
        """Label of the staged weights; empty if there are none."""
        return self._staged.version if self._staged else ""

    async def stage(self, path: str, version: str) -> str:
        """Loads a checkpoint beside the weights in use, in place of what was staged; returns its fingerprint.

        Raises:
            InvalidRequestError: `param` "version": it is no new label; "path": the checkpoint is missing, broken or
                another model.
            ConflictError: `discard` or another `stage` came while it was loading.
            UnavailableError: there is no memory for it.
        """
        self._check_version(version)
        folder = _folder(path)
        self.discard()
        attempt = self._attempt
        log.info("weights_loading", path=path, version=version)
        loaded = await self._load(folder)
        if attempt != self._attempt:
            raise ConflictError(f"the weights of version {version!r} were discarded while they were loading")
        self._check_label(version, loaded.fingerprint)
        self._staged = _Staged(folder, version, loaded)
        log.info("weights_staged", path=path, version=version, fingerprint=loaded.fingerprint)
        return loaded.fingerprint

    def discard(self) -> None:
        """Forgets what is staged or on its way."""
        if self._staged:
            log.info("weights_discarded", version=self._staged.version)
        self._staged = None
        self._attempt += 1

    def commit(self, version: str) -> None:
        """Puts the staged weights to use. Raises ConflictError if nothing of that label is staged."""
        staged = self._staged
        if staged is None or staged.version != version:
            found = f"version {staged.version!r} is" if staged else "nothing is"
            raise ConflictError(f"version {version!r} is not staged ({found}); stage it first")
        self._use(staged.loaded.decoder, version)
        self.released = False
        self._used[version] = staged.loaded.fingerprint
        description = types_pb2.ModelDescription()
        description.CopyFrom(self._description)
        description.weight_version, description.fingerprint = version, staged.loaded.fingerprint
        self._description, self._path, self._staged = description, staged.path, None
        self.num_updates += 1
        log.info("weights_committed", version=version, fingerprint=staged.loaded.fingerprint)

    def release(self) -> None:
        """Lets go of the weights in use. Only while no step can run."""
        self._use(None, self.version)
        self.released = True

    async def load_again(self) -> LoadedModel:
        """The weights that were released, from their checkpoint.

        Raises:
            ConflictError: it cannot be loaded any more, or its directory holds other weights by now.
        """
        try:
            loaded = await self._load(self._path)
        except InvalidRequestError as error:
            raise ConflictError(f"{error.message}; stage and commit other weights, then wake up") from error
        if loaded.fingerprint != self._description.fingerprint:
            raise ConflictError(
                f"{self._path} holds other weights than version {self.version!r} had; "
                "stage and commit them under a new version, then wake up"
            )
        return loaded

    def restore(self, loaded: LoadedModel) -> None:
        """Takes back what `load_again` has loaded."""
        self._use(loaded.decoder, self.version)
        self.released = False

    def _check_version(self, version: str) -> None:
        if not version or len(version) > MAX_VERSION_CHARS or not version.isprintable():
            raise InvalidRequestError(
                f"version must be 1 to {MAX_VERSION_CHARS} printable characters, got {version[:200]!r}",
                param="version",
            )
        if version == self.version:
            raise InvalidRequestError(
                f"version {version!r} is in use already; give the new weights another one", param="version"
            )

    def _check_label(self, version: str, fingerprint: str) -> None:
        """One label never names two sets of weights: a trainer tells by it which ones a token came from."""
        if self._used.get(version, fingerprint) != fingerprint:
            raise InvalidRequestError(
                f"version {version!r} named other weights before; give these another one", param="version"
            )


def _folder(path: str) -> Path:
    """Raises InvalidRequestError unless it is an absolute path of a directory on this machine."""
    folder = Path(path)
    if not folder.is_absolute():
        raise InvalidRequestError(f"path must be absolute on the worker's machine, got {path[:200]!r}", param="path")
    try:
        found = folder.is_dir()
    except (OSError, ValueError) as error:  # too long a name, or a NUL in it
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequestError(f"path {path[:200]!r} cannot be read: {reason}", param="path") from error
    if not found:
        raise InvalidRequestError(f"path {path[:200]!r} is no directory on the worker's machine", param="path")
    return folder
