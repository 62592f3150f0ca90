"""What the compiler makes of a kernel for a GPU that is not there: compiled by ptxas, read off the machine code."""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.contract.shapes import LARGEST

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

# Machine instructions by what they tell; each line of the listing has one instruction after its address.
PATTERNS = {
    "wide_loads": r"\bLDG\.E\S*\.128",
    "narrow_loads": r"\bLDG\.E(?!\S*\.(?:64|128))",
    "wide_stores": r"\bSTG\.E\S*\.128",
    "async_copies": r"\bLDGSTS\S*\.128",
    "half_copies": r"\bLDGSTS\S*\.64",
    "byte_loads": r"\bLDS\.[US]8",
    "matrix": r"\b(?:HMMA|HGMMA|QMMA|QGMMA|IMMA|IGMMA)",
    "spill_instructions": r"\b(?:STL|LDL)\b",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel with one set of constants. `types`: Triton types of its other arguments, in any order; pointers are
    taken to be aligned to 16 bytes, as torch's are, but for those that the kernel is not specialized by. `tile_bytes`:
    what an inner step reads, 0 where it is not staged, and how many `loops` stage tiles."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int
    tile_bytes: int = 0
    loops: int = 1

    def compile(self, arch: int) -> Any:
        """Compile for compute capability `arch`: Triton's `CompiledKernel`. Raises whatever the compiler raises."""
        names = [param.name for param in self.kernel.params]
        missing = set(names) - set(self.types) - set(self.constants)
        if missing:
            raise ValueError(f"{self.name}: no type or value for {sorted(missing)}")
        signature = {name: self.types.get(name, "constexpr") for name in names}
        constants = {(names.index(name),): value for name, value in self.constants.items()}
        aligned = {
            (at,): [["tt.divisibility", 16]]
            for at, name in enumerate(names)
            if signature[name].startswith("*") and not self.kernel.params[at].do_not_specialize
        }
        return triton.compile(
            ASTSource(self.kernel, signature, constants, aligned),
            target=GPUTarget("cuda", arch, 32),
            options={"num_warps": self.warps, "num_stages": self.stages},
        )


class Watched(Protocol):
    """A kernel of the contract: a `Case`, or one that is compiled in another way."""

    @property
    def name(self) -> str: ...
    @property
    def kernel(self) -> Any: ...
    @property
    def warps(self) -> int: ...
    @property
    def stages(self) -> int: ...
    @property
    def tile_bytes(self) -> int: ...
    @property
    def loops(self) -> int: ...
    def compile(self, arch: int) -> Any: ...


def measure(case: Watched, arch: int) -> dict[str, int]:
    """Compile for compute capability `arch` and count. Raises whatever the compiler raises."""
    compiled = case.compile(arch)
    counts = {"shared_bytes": compiled.metadata.shared}
    if case.name.startswith(LARGEST):
        return counts
    counts |= _listing(compiled.asm["cubin"])
    if case.tile_bytes:
        counts["tiles_ahead"] = _tiles_ahead(compiled.asm["ptx"], case)
    return counts


def _tiles_ahead(ptx: str, case: Watched) -> int:
    """Tiles under way while one is computed on: the copies of the prologue are there beside those of the loop."""
    sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x([0-9a-f]+)", ptx)
    staged_bytes = sum(int(size, 16) for size in sizes) * 32 * case.warps
    return max(0, staged_bytes // (case.tile_bytes * case.loops) - 1)


def _listing(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("--dump-resource-usage", file.name)
        listing = _tool("-sass", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise ValueError(f"no resource usage in {usage!r}")
    counts = {"registers": int(found[1]), "stack_bytes": int(found[2])}
    for name, pattern in PATTERNS.items():
        counts[name] = len(re.findall(pattern, listing))
    return counts


def _tool(option: str, path: str) -> str:
    environment = {**os.environ, "PATH": f"{TOOLS}{os.pathsep}{os.environ.get('PATH', '')}"}
    done = subprocess.run(
        [str(TOOLS / "cuobjdump"), option, path],
        capture_output=True,
        text=True,
        check=True,
        timeout=900,
        env=environment,
    )
    return done.stdout
