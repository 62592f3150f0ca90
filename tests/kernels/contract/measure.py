"""What the compiler makes of a kernel for a GPU that is not there: compiled by ptxas, read off the machine code."""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

# Machine instructions by what they tell; each line of the listing has one instruction after its address.
PATTERNS = {
    "wide_loads": r"\bLDG\.E\S*\.128",
    "narrow_loads": r"\bLDG\.E(?!\S*\.(?:64|128))",
    "wide_stores": r"\bSTG\.E\S*\.128",
    "async_copies": r"\bLDGSTS\S*\.128",
    "half_copies": r"\bLDGSTS\S*\.64",
    "byte_loads": r"\bLDS\.[US]8",
    "matrix": r"\b(?:HMMA|HGMMA|IMMA|IGMMA)",
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


def measure(case: Case, arch: int) -> dict[str, int]:
    """Compile for compute capability `arch` and count. Raises whatever the compiler raises."""
    names = [param.name for param in case.kernel.params]
    missing = set(names) - set(case.types) - set(case.constants)
    if missing:
        raise ValueError(f"{case.name}: no type or value for {sorted(missing)}")
    signature = {name: case.types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if signature[name].startswith("*") and not case.kernel.params[at].do_not_specialize
    }
    compiled = triton.compile(
        ASTSource(case.kernel, signature, constants, aligned),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": case.warps, "num_stages": case.stages},
    )
    counts = _listing(compiled.asm["cubin"])
    counts["shared_bytes"] = compiled.metadata.shared
    if case.tile_bytes:
        counts["tiles_ahead"] = _tiles_ahead(compiled.asm["ptx"], case)
    return counts


def _tiles_ahead(ptx: str, case: Case) -> int:
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
        timeout=60,
        env=environment,
    )
    return done.stdout
