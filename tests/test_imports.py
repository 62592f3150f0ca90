"""Who may import whom, read off the import statements of every file (also those inside functions)."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = (
    "access",
    "benchmarks",
    "cluster",
    "decode_worker",
    "engine",
    "fakes",
    "kernels",
    "prefill_worker",
    "protos",
    "router",
    "telemetry",
    "transfer",
    "worker",
)

# A package may import itself and these; an entry covers what lies below it. What is not listed (the benchmarks) may
# import everything; nobody imports it.
ALLOWED = {
    "access": (),
    "kernels": (),
    "protos": (),
    "telemetry": (),
    "engine": ("kernels",),
    "transfer": (
        *("engine.identity", "engine.kv", "engine.storage", "engine.types", "engine.messages"),
        "kernels",
    ),
    "worker": ("access", "engine", "transfer", "telemetry"),
    "prefill_worker": ("engine", "transfer", "worker", "telemetry"),
    "decode_worker": ("engine", "transfer", "worker", "telemetry"),
    "router": (
        "access",
        "protos",
        "telemetry",
        "engine.constraints.formats",
        "engine.constraints.text",
        "engine.constraints.trial_messages",
        "engine.text",
        "engine.types",
        "engine.identity",
        "engine.dialing",
        "engine.handshake",
        "engine.messages",
        "engine.packed_logprobs",
        "engine.plan",
    ),
    "cluster": (
        *("access", "decode_worker", "engine", "kernels", "prefill_worker"),
        *("protos", "router", "telemetry", "transfer", "worker"),
    ),
    "fakes": (
        *("access", "decode_worker", "engine", "kernels", "prefill_worker"),
        *("protos", "router", "telemetry", "transfer", "worker"),
    ),
}

# What decides: no torch, no sockets, no threads, no clocks, in any of their files or in what these import of ours.
PURE_FOLDERS = (
    "decode_worker/scheduler",
    "engine/kv",
    "prefill_worker/scheduler",
    "router/core",
    "transfer/handoff",
)

# The same, of its own imports, holds for every file whose head says that it is pure. These decide too, among others.
SAYS_PURE = re.compile(r"\bPure\b")
DECIDES_ALONE = (
    "cluster/plan/planner.py",
    "cluster/processes/supervisor.py",
    "engine/beam.py",
    "engine/plan.py",
    "router/front/timing.py",
    "transfer/nccl/pair.py",
)

IMPURE = (
    *("_thread", "asyncio", "concurrent", "ctypes", "datetime", "fcntl", "http", "io", "logging", "mmap"),
    *("multiprocessing", "os", "pathlib", "queue", "random", "sched", "secrets", "select", "selectors", "shutil"),
    *("signal", "socket", "socketserver", "ssl", "subprocess", "tempfile", "threading", "time", "urllib", "uuid"),
    *("cupy", "grpc", "ray", "starlette", "torch", "triton", "uvicorn"),
)

# Arrays without a device: of those that decide, for these alone.
WITH_NUMPY = ("router/core/*.py", "router/core/*/*.py")

# These must work without torch, and therefore without anything of ours that imports it.
TORCH_FREE = (
    "access/*.py",
    "engine/constraints/*.py",
    "engine/types.py",
    "engine/messages.py",
    "engine/identity.py",
    "engine/plan.py",
    "engine/config.py",
    "engine/kv/layout.py",
    "engine/model/prepared/cache.py",
    "engine/model/files/*_text.py",
    "engine/text/*.py",
    "router/*.py",
    "router/*/*.py",
    "router/*/*/*.py",
    "cluster/*.py",
    "cluster/cli/__main__.py",
    "cluster/cli/command.py",
    "cluster/cli/parser.py",
    "cluster/cli/ask.py",
    "cluster/plan/*.py",
    "cluster/processes/*.py",
    "telemetry/*.py",
)

# Foreign packages that stay behind one border.
CONFINED = {
    "ray": ("cluster/processes/*.py",),
    "grpc": (
        "*/service.py",
        "access/internal.py",
        "benchmarks/front_bare.py",  # it measures what gRPC itself costs
        "decode_worker/peer.py",
        "router/dispatch.py",
        "router/client/*.py",
        "router/grpc/calls.py",
        "router/grpc/client.py",
        "router/server.py",
        "protos/*.py",
        "worker/rpc.py",
    ),
    "triton": ("kernels/*.py",),
    "transformers": ("benchmarks/checkpoint.py",),
}


BENCHMARKS_WITH_PROCESSES = (
    "benchmarks/bed.py",
    "benchmarks/counting.py",
    "benchmarks/front_router.py",
    "benchmarks/gpu/absent.py",
    "benchmarks/gpu/dry.py",
    "benchmarks/gpu/transport.py",
    "benchmarks/gpu/versions.py",
    "benchmarks/gpu/wheels.py",
    "benchmarks/peers.py",
)


def sources(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


@cache
def statements(path: Path, *, everywhere: bool = True) -> tuple[tuple[int, str], ...]:
    """Return (line, dotted name) of each import; with `everywhere` false only those that run on import. A file is read
    once."""
    return tuple(_statements(path, everywhere))


def _statements(path: Path, everywhere: bool) -> Iterator[tuple[int, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            # `from engine import types` names a module in its list, `from engine.types import X` does not.
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
        elif everywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not everywhere and isinstance(node, ast.If) and _is_type_checking(node.test):
                continue
            pending.extend(ast.iter_child_nodes(node))


def _is_type_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def matches(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(Path(relative(path)).match(pattern) for pattern in patterns)


def in_pure_folder(path: Path) -> bool:
    return relative(path).startswith(tuple(f"{folder}/" for folder in PURE_FOLDERS))


def says_pure(path: Path) -> bool:
    return SAYS_PURE.search(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "") is not None


def is_impure(name: str) -> bool:
    return name != "random.Random" and any(under(name, module) for module in IMPURE)


def ways_to(modules: tuple[str, ...], paths: list[Path]) -> dict[str, str]:
    """Return those of `paths` that import one of `modules` as they are imported themselves, and through which files."""
    reaches: dict[Path, str | None] = {}

    def way(path: Path) -> str | None:
        if path not in reaches:
            reaches[path] = None
            for _, name in statements(path, everywhere=False):
                if name != "random.Random" and any(under(name, module) for module in modules):
                    reaches[path] = name
                    break
                target = module_file(name) if name.split(".")[0] in OURS else None
                further = way(target) if target is not None else None
                if target is not None and further is not None:
                    reaches[path] = f"{relative(target)} -> {further}"
                    break
        return reaches[path]

    return {relative(path): found for path in paths if (found := way(path)) is not None}


def module_file(name: str) -> Path | None:
    """Return the file of the longest prefix of a dotted name that is a module of ours."""
    parts = name.split(".")
    while parts:
        base = ROOT.joinpath(*parts)
        if base.with_suffix(".py").is_file():
            return base.with_suffix(".py")
        if (base / "__init__.py").is_file():
            return base / "__init__.py"
        parts.pop()
    return None


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_packages_import_only_what_they_may(package: str) -> None:
    """Guards against the wrong dependency: a decode worker that needs prefill code, a kernel that
    knows a request type."""
    may = (package, *ALLOWED[package])
    wrong = [
        f"{relative(path)}:{line}: {name}"
        for path in sources(package)
        for line, name in statements(path)
        if name.split(".")[0] in OURS and not any(under(name, prefix) for prefix in may)
    ]
    assert wrong == []


@pytest.mark.parametrize("foreign", sorted(CONFINED))
def test_foreign_packages_stay_behind_their_border(foreign: str) -> None:
    """Guards against Ray, gRPC or Triton spreading, and against transformers at run time: it looks
    for a package named `kernels` and would find ours."""
    wrong = [
        f"{relative(path)}:{line}: {name}"
        for path in sources(*OURS)
        for line, name in statements(path)
        if under(name, foreign) and not matches(path, CONFINED[foreign])
    ]
    assert wrong == []


def test_torch_free_modules_reach_no_torch() -> None:
    """Guards against a router or CLI that takes seconds and 200 MB to start because something far
    down its imports needs torch. Follows our own imports to the end."""
    wanted = [path for path in sources(*OURS) if matches(path, TORCH_FREE)]
    assert ways_to(("torch", "triton"), wanted) == {}


def test_decisions_import_no_clock_and_no_io() -> None:
    """Guards against a scheduler that reads a clock or opens a socket, and so cannot be replayed. Imports inside
    functions count; of what is imported of ours, those that run on import."""
    decide = [path for path in sources(*OURS) if in_pure_folder(path) or says_pure(path)]
    assert set(DECIDES_ALONE) <= set(map(relative, decide)), "its head says no more that it is pure"
    assert {folder for folder in PURE_FOLDERS if not (ROOT / folder).is_dir()} == set()
    wrong = [
        f"{relative(path)}:{line}: {name}"
        for path in decide
        for line, name in statements(path)
        if is_impure(name)
    ]
    assert wrong == []
    assert ways_to(IMPURE, [path for path in decide if in_pure_folder(path)]) == {}
    plain = [path for path in decide if in_pure_folder(path) and not matches(path, WITH_NUMPY)]
    assert ways_to(("numpy",), plain) == {}


def test_imports_make_no_circle() -> None:
    """Guards against two files of which neither can be read, or imported, without the other: imports for types alone
    and those inside functions count."""
    edges = {
        path: sorted(
            {
                target
                for _, name in statements(path)
                if name.split(".")[0] in OURS and (target := module_file(name)) is not None
            }
            - {path}
        )
        for path in sources(*OURS)
    }
    done: set[Path] = set()
    circles: list[str] = []

    def visit(path: Path, way: tuple[Path, ...]) -> None:
        if path in way:
            circles.append(" -> ".join(map(relative, (*way[way.index(path) :], path))))
        elif path not in done:
            for target in edges.get(path, ()):
                visit(target, (*way, path))
            done.add(path)

    for path in edges:
        visit(path, ())
    assert circles == []


def test_environment_is_read_in_one_place() -> None:
    """Guards against settings that `dump-config` cannot show."""
    wrong = [
        f"{relative(path)}:{node.lineno}"
        for path in sources(*OURS)
        # Benchmarks that tell their own worker processes, or Triton, something; nobody sets it.
        if not matches(path, ("cluster/*.py", "cluster/*/*.py", *BENCHMARKS_WITH_PROCESSES))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
    ]
    assert wrong == []


def test_init_files_are_empty() -> None:
    """Guards against import cycles and against work done by a mere `import engine`."""
    packages = [path.parent for path in sources(*OURS) if path.name != "__init__.py"]
    assert [relative(folder) for folder in packages if not (folder / "__init__.py").is_file()] == []
    inits = [path for path in sources(*OURS) if path.name == "__init__.py"]
    assert [relative(path) for path in inits if path.read_bytes()] == []


def test_the_rules_can_be_broken(tmp_path: Path) -> None:
    """Guards against a walker that sees nothing: imports in functions and in `from` lists count."""
    file = tmp_path / "x.py"
    file.write_text("from engine import types\ndef f():\n    import torch.nn as nn\n")
    assert sorted(name for _, name in statements(file)) == ["engine.types", "torch.nn"]
    assert [name for _, name in statements(file, everywhere=False)] == ["engine.types"]
    assert module_file("engine.kv.layout.KVLayout") == ROOT / "engine" / "kv" / "layout.py"
