"""What the peer lacks."""

from pathlib import Path

import pytest

from benchmarks import peer


def test_a_missing_library_is_named_and_not_preloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = tmp_path / "libtcmalloc.so"
    monkeypatch.setattr(peer, "_tcmalloc", lambda: allocator)
    assert peer.shortcoming(tmp_path) == "vLLM ran below its best, without its own OpenMP (libiomp5)"
    assert peer.environment(tmp_path)["LD_PRELOAD"] == str(allocator)
    openmp = tmp_path / "lib" / "libiomp5.so"
    openmp.parent.mkdir()
    openmp.touch()
    assert peer.shortcoming(tmp_path) is None
    assert peer.environment(tmp_path)["LD_PRELOAD"] == f"{allocator}:{openmp}"
    monkeypatch.setattr(peer, "_tcmalloc", lambda: None)
    assert peer.shortcoming(tmp_path) == "vLLM ran below its best, without the system's libtcmalloc-minimal4"
