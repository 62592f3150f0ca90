"""Builds the client as a wheel of its own, from the sources of the project around this folder: `router/client`, and the
generated schema. Nothing is written beside them, and no file is shared with the project's own wheel.

Only a wheel is built (`pip wheel ./headrace-client`, or `pip install ./headrace-client`): an archive of this folder
alone would lack the sources.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "headrace_client"
HEAD = '''"""The Python client of Headrace: docs/client.md says what it does."""

from headrace_client.channel import ClientSecrets
from headrace_client.client import AsyncClient, SyncClient
from headrace_client.errors import ApiError
from headrace_client.program import AsyncProgram, Selection, SyncProgram, ajoin, join
from headrace_client.requests import GeneratedText

__all__ = [
    "ApiError",
    "AsyncClient",
    "AsyncProgram",
    "ClientSecrets",
    "GeneratedText",
    "Selection",
    "SyncClient",
    "SyncProgram",
    "ajoin",
    "join",
]
'''


def own(text: str) -> str:
    """Return a module's text as it stands in the wheel. The schema is kept in a pool of its own: another version of it
    may be imported in the same process."""
    text = re.sub(r"\bfrom router\.client\.", f"from {PACKAGE}.", text)
    text = re.sub(r"\bfrom protos import\b", f"from {PACKAGE} import", text)
    return text.replace("_descriptor_pool.Default()", "_descriptor_pool.DescriptorPool()")


def files() -> dict[str, str]:
    """Return the modules of the wheel, by name."""
    sources = [*sorted((ROOT / "router" / "client").glob("*.py")), *sorted((ROOT / "protos").glob("headrace_pb2.py*"))]
    made = {path.name: own(path.read_text(encoding="utf-8")) for path in sources if path.name != "__init__.py"}
    return {**made, "__init__.py": HEAD, "py.typed": ""}


class BuildPy(build_py):
    """Writes the modules instead of copying a folder."""

    def run(self) -> None:
        folder = Path(self.build_lib) / PACKAGE
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files().items():
            (folder / name).write_text(text, encoding="utf-8")

    def get_source_files(self) -> list[str]:
        return []

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [str(Path(self.build_lib) / PACKAGE / name) for name in files()]


setup(
    version=tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"],
    packages=[PACKAGE],
    package_dir={PACKAGE: "."},
    cmdclass={"build_py": BuildPy},
)
