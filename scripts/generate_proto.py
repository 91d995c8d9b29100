"""Generates common/pb from proto/, or with --check fails if the committed files differ from what protoc writes."""

import argparse
import filecmp
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("common/pb")


def generate(out: Path) -> None:
    """Runs protoc with every plugin; imports inside the generated code read `common.pb.…`."""
    sources = sorted(str(path) for path in (ROOT / "proto").glob("*.proto"))
    well_known = resources.files("grpc_tools") / "_proto"
    plugins = [f"--{name}_out={out}" for name in ("python", "grpc_python", "mypy", "mypy_grpc")]
    # The interpreter's own folder: the plugins are not on PATH unless the virtual environment is activated.
    scripts = Path(sys.executable).parent
    plugins += [f"--plugin=protoc-gen-{name}={scripts / f'protoc-gen-{name}'}" for name in ("mypy", "mypy_grpc")]
    arguments = ["protoc", f"-I{PACKAGE}={ROOT / 'proto'}", f"-I{well_known}", *plugins]
    if protoc.main([*arguments, "--mypy_opt=quiet", "--mypy_grpc_opt=quiet", *sources]) != 0:
        raise SystemExit("protoc failed")


def drifted(fresh: Path) -> list[str]:
    """Names of generated files that are missing, left over or different in the tree."""
    committed = {p.name for p in (ROOT / PACKAGE).glob("*_pb2*") if p.suffix != ".pyc"}
    written = {p.name for p in (fresh / PACKAGE).iterdir()}
    _, mismatch, _ = filecmp.cmpfiles(ROOT / PACKAGE, fresh / PACKAGE, sorted(committed & written), shallow=False)
    return sorted((committed ^ written) | set(mismatch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    if not parser.parse_args().check:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        stale = drifted(Path(folder))
    if stale:
        sys.exit(f"common/pb differs from proto/: {', '.join(stale)}; run `make proto`")


if __name__ == "__main__":
    main()
