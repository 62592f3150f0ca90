"""One file with all that a machine with a GPU needs: `python3 -m benchmarks.gpu.bundle --out FILE.tar.gz`

The project as it is here (what git tracks, and new files that it does not ignore) and the wheels of packages that such
a machine may lack, in the versions of `constraints.txt`; no model. There, nothing has to be installed or fetched:

    tar xzf FILE.tar.gz && cd headrace && python3 -m benchmarks.gpu.first_run --out DIR

Needs pip and a network, or `--wheels DIR`; of Python nothing but the standard library.
"""

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu.wheels import PACKAGES, ROOT, normal, parsed
from telemetry.build import NOTE, noted, of_checkout

TOP = "headrace"
WHEELS = "wheels"
LIMIT_BYTES = 64 << 20
PYTHONS = ("3.12",)
GLIBC = range(17, 29)
"""The minor versions of glibc 2 that wheels may be for."""
SKIPPED = {"__pycache__", "build", "dist", WHEELS}
BUILT = (".pyc", ".so", ".egg-info")
_MIB = 1 << 20


class BundleRefused(Exception):
    """No bundle can be made; the message says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the bundle. Returns 1 where a wheel cannot be had, or the bundle would be too large."""
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            wheels = sorted(options.wheels.glob("*.whl")) if options.wheels else []
            if options.wheels is None:
                wheels = download(options.python or PYTHONS, Path(scratch))
            # An earlier bundle may lie in the tree.
            files = [path for path in project_files(ROOT) if ROOT / path != options.out.resolve()]
            write(options.out, files, wheels)
        except BundleRefused as error:
            print(f"benchmarks.gpu.bundle: {error}", file=sys.stderr)
            return 1
    for line in contents(options.out):
        print(line)
    return 0


def project_files(root: Path) -> list[Path]:
    """List the project's files relative to `root`. Outside of a git checkout all that is not hidden, built, or a wheel.
    """
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
        return sorted(Path(name) for name in set(listed) if name and (root / name).is_file())
    found = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return sorted(
        path
        for path in found
        if not any(part in SKIPPED or part.startswith(".") or part.endswith(BUILT) for part in path.parts)
    )


def download(pythons: Sequence[str], folder: Path) -> list[Path]:
    """Fetch the wheels of all packages for Linux on x86-64; none is built here. Raises BundleRefused."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {normal(line.partition("==")[0]): line for line in lines if not line.startswith("#")}
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    for python in pythons:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--implementation=cp", f"--python-version={python}", f"--dest={folder}"]
        command += [f"--platform={name}" for name in platforms]
        tried = subprocess.run([*command, *(pins[name] for name in PACKAGES)], capture_output=True, text=True)
        if tried.returncode:
            raise BundleRefused(f"pip cannot get wheels for Python {python}:\n{tried.stderr.strip()}")
    return sorted(folder.glob("*.whl"))


def write(out: Path, files: Sequence[Path], wheels: Sequence[Path]) -> None:
    """Write the bundle. Raises BundleRefused, and leaves no file, where it is over the limit."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.name}.part")
    try:
        with tarfile.open(part, "w:gz") as tar:
            for path in files:
                tar.add(ROOT / path, f"{TOP}/{path}", filter=_anonymous)
            for wheel in wheels:
                tar.add(wheel, f"{TOP}/{WHEELS}/{wheel.name}", filter=_anonymous)
            revision = (noted(ROOT / "telemetry" / NOTE) or of_checkout(ROOT)).encode()
            if revision:
                note = tarfile.TarInfo(f"{TOP}/telemetry/{NOTE}")
                note.size = len(revision)
                tar.addfile(note, io.BytesIO(revision))
        if part.stat().st_size > LIMIT_BYTES:
            raise BundleRefused(f"{part.stat().st_size / _MIB:.1f} MiB, and {LIMIT_BYTES / _MIB:.0f} are allowed")
        os.replace(part, out)
    finally:
        part.unlink(missing_ok=True)


def contents(bundle: Path) -> Iterator[str]:
    """Return a line for each folder of the project and for each wheel, and one for all."""
    folders: dict[str, list[int]] = {}
    with tarfile.open(bundle) as tar:
        for member in tar:
            _, _, path = member.name.partition("/")
            top, inside, name = path.partition("/")
            if top == WHEELS:
                wheel = parsed(Path(name))
                yield f"{WHEELS}: {wheel.name} {wheel.version} ({wheel.python}), {member.size / _MIB:.1f} MiB"
            else:
                folders.setdefault(top if inside else "files beside them", []).append(member.size)
    for folder, sizes in sorted(folders.items()):
        yield f"{folder}: {len(sizes)} files, {sum(sizes) / _MIB:.1f} MiB"
    yield f"written: {bundle}, {bundle.stat().st_size / _MIB:.1f} of {LIMIT_BYTES / _MIB:.0f} MiB"


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu.bundle",
        description="Packs the project and wheels for a machine with a GPU and no network.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="such as headrace-gpu.tar.gz")
    parser.add_argument(
        "--python", action="append", metavar="X.Y",
        help=f"of the machine, once or more (default: {', '.join(PYTHONS)})",
    )  # fmt: skip
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="takes those that lie there instead of pip's")
    return parser


if __name__ == "__main__":
    sys.exit(main())
