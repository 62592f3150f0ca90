"""Make the committed Python code from the `.proto` files, or check that it is up to date.

`python -m protos.generate` writes next to the sources; `--check` compares and changes nothing. The
include root is the repository root, so that generated modules import as `protos.<name>_pb2`.
"""

import argparse
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(target: Path) -> list[Path]:
    """Write the generated files under `target` and return their paths, relative to it."""
    sources = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("protos/*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={ROOT}",
            f"--proto_path={files('grpc_tools') / '_proto'}",
            f"--python_out={target}",
            f"--pyi_out={target}",
            f"--grpc_python_out={target}",
            *sources,
        ]
    )
    if status:
        raise RuntimeError(f"protoc ended with status {status}")
    stems = [source.removesuffix(".proto") for source in sources]
    return [Path(s + end) for s in stems for end in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")]


def drift() -> list[str]:
    """The committed generated files that differ from what their sources yield."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        return [
            name.as_posix()
            for name in generate(fresh)
            if not (ROOT / name).exists()
            or (ROOT / name).read_bytes() != (fresh / name).read_bytes()
        ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="protos.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a committed file is stale")
    if not parser.parse_args(argv).check:
        generate(ROOT)
        return 0
    stale = drift()
    for name in stale:
        print(f"{name} is stale: run python -m protos.generate", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
