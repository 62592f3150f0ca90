"""Notes the git revision in what is built, where `telemetry.build` finds it; the rest is in pyproject.toml."""

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildPy(build_py):
    """An editable install asks its checkout, and a folder that has the note already brings it along."""

    def run(self) -> None:
        super().run()
        build = runpy.run_path(str(ROOT / "telemetry" / "build.py"))
        revision = build["of_checkout"](ROOT)
        if revision and not self.editable_mode:
            (Path(self.build_lib) / "telemetry" / build["NOTE"]).write_text(revision + "\n")


setup(cmdclass={"build_py": BuildPy})
