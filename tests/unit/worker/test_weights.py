"""Staged weights: labels, paths, and what happens when attempts overlap."""

import asyncio
from pathlib import Path
from typing import cast

import pytest

from common.errors import ConflictError, InvalidRequestError
from common.model.decoder import MoeDecoder
from common.model.loader import LoadedModel
from common.pb import types_pb2
from common.worker.weights import Weights


class Disk:
    """Loads whatever `fingerprint` is at the end of the loading; while `go` is clear nothing is loaded."""

    def __init__(self) -> None:
        self.fingerprint = "f8"
        self.go = asyncio.Event()
        self.go.set()
        self.loading = asyncio.Event()
        description = types_pb2.ModelDescription(weight_version="7", fingerprint="f7")
        self.weights = Weights(description, Path("/"), self._load, lambda decoder, version: None)

    async def _load(self, path: Path) -> LoadedModel:
        self.loading.set()
        await self.go.wait()
        return LoadedModel(cast(MoeDecoder, object()), self.fingerprint)


@pytest.mark.parametrize("version", ["", "a\nb", "x" * 129, "7"])
async def test_versions_that_cannot_be_used(version: str) -> None:
    disk = Disk()
    with pytest.raises(InvalidRequestError) as caught:
        await disk.weights.stage("/", version)
    assert caught.value.param == "version"
    assert not disk.loading.is_set()


@pytest.mark.parametrize("path", ["", "weights", "/no/such/directory", "/etc/hostname", "/\0", "/" + "x" * 5000])
async def test_paths_that_cannot_be_used(path: str) -> None:
    disk = Disk()
    with pytest.raises(InvalidRequestError) as caught:
        await disk.weights.stage(path, "8")
    assert caught.value.param == "path"
    assert len(caught.value.message) < 400


async def test_a_label_never_names_two_sets_of_weights() -> None:
    disk = Disk()
    await disk.weights.stage("/", "8")
    disk.weights.commit("8")
    disk.fingerprint = "f9"
    with pytest.raises(InvalidRequestError, match="'7' named other weights") as caught:
        await disk.weights.stage("/", "7")
    assert caught.value.param == "version"
    disk.fingerprint = "f7"
    await disk.weights.stage("/", "7")  # back to the first ones
    disk.weights.commit("7")
    assert disk.weights.description.fingerprint == "f7"


async def test_a_refused_attempt_leaves_what_is_in_use() -> None:
    disk = Disk()
    await disk.weights.stage("/", "8")
    with pytest.raises(InvalidRequestError):
        await disk.weights.stage("/no/such/directory", "9")
    assert (disk.weights.version, disk.weights.staged_version) == ("7", "8")


@pytest.mark.parametrize("by", ["discard", "stage"])
async def test_an_attempt_that_was_overtaken_comes_to_nothing(by: str) -> None:
    disk = Disk()
    disk.go.clear()
    first = asyncio.create_task(disk.weights.stage("/", "8"))
    await disk.loading.wait()
    second = None
    if by == "discard":
        disk.weights.discard()
    else:
        second = asyncio.create_task(disk.weights.stage("/", "9"))
        await asyncio.sleep(0)
    disk.go.set()
    with pytest.raises(ConflictError, match="'8' were discarded"):
        await first
    if second is not None:
        await second
    assert disk.weights.staged_version == ("" if second is None else "9")
