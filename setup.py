"""Builds what pyproject.toml cannot say: the native kernels, and a note of the git revision, which `telemetry.build`
reads."""

import platform
import runpy
from hashlib import blake2b
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SOURCES = sorted((ROOT / "kernels" / "cpu").glob("*.[ch]*"))
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-fvisibility=hidden"]
SETS = (
    {
        "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"],
        "avx2": ["-mavx2", "-mfma", "-mf16c"],
    }
    if platform.machine().lower() in ("x86_64", "amd64")
    else {"plain": []}
)
"""Instruction sets, as `kernels.native` names them."""


class BuildPy(build_py):
    """Notes the revision in what is built. An editable install asks its checkout, and a folder that has the note
    already keeps it."""

    def run(self) -> None:
        super().run()
        build = runpy.run_path(str(ROOT / "telemetry" / "build.py"))
        revision = build["of_checkout"](ROOT)
        if revision and not self.editable_mode:
            (Path(self.build_lib) / "telemetry" / build["NOTE"]).write_text(revision + "\n")


class BuildExt(build_ext):
    """Builds libraries for ctypes, not Python modules. Without a compiler there are none, and PyTorch's kernels serve.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        # One library after the other: all are of the same sources, and what these compile to lies in one folder.
        self.parallel = None

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []


def digest() -> str:
    """Compute `kernels.native.source_digest`, which cannot be imported where PyTorch is not."""
    found = blake2b(digest_size=8)
    for path in SOURCES:
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


def host_library() -> Extension:
    """Return what any process may use: without PyTorch, and for any processor (`engine.native_identity`)."""
    sources = ["kernels/host/identity.cpp"]
    return Extension(
        "kernels._native_host",
        sources=sources,
        depends=sources,
        extra_compile_args=[*FLAGS, "-O2"],
        language="c++",
        optional=True,
    )


def library(name: str, flags: list[str]) -> Extension:
    return Extension(
        f"kernels._native_{name}",
        sources=[str(path.relative_to(ROOT)) for path in SOURCES if path.suffix == ".cpp"],
        depends=[str(path.relative_to(ROOT)) for path in SOURCES],
        define_macros=[("HEADRACE_SOURCES", f'"{digest()}"')],
        extra_compile_args=[*FLAGS, *flags],
        extra_link_args=["-pthread"],
        language="c++",
        optional=True,
    )


setup(
    cmdclass={"build_py": BuildPy, "build_ext": BuildExt},
    ext_modules=[host_library(), *(library(name, flags) for name, flags in SETS.items())],
)
