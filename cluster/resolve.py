"""Resolves flags, variables, a file and defaults into one configuration that knows where each value came from.

Precedence: flag, then `HEADRACE_*` variable, then file, then default, which may depend on the device
(`cluster.defaults`). A key is dotted (`prefill.chunk_tokens`); as a variable it is
`HEADRACE_PREFILL__CHUNK_TOKENS`, in the TOML file `chunk_tokens` under `[prefill]`, as a flag
`--set prefill.chunk_tokens=64`. The most used settings have flags of their own.
"""

import argparse
import difflib
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from access.client import VARIABLES
from cluster.config import (
    DEVICE_KEYS,
    DTYPE_KEYS,
    MEMORY_KEYS,
    SHARE_KEYS,
    THREAD_KEYS,
    ClusterConfig,
    ConfigError,
    build,
    default_threads,
    draft_problem,
    fields,
    problem,
)
from cluster.defaults import (
    CPU_DTYPE,
    POOLS,
    Pool,
    defaults_on,
    device_share,
    gpu_dtype,
    shares_cores,
    stored_in,
)
from cluster.memory import available_bytes
from engine.config import EngineConfig
from transfer.config import NcclConfig
from transfer.handoff.negotiation import AS_STORED

ENV_PREFIX = "HEADRACE_"
_SERVICE = re.compile(r"HEADRACE_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")

ONE_POOL = "--workers"
"""Stands for two settings: no prefill workers, and so many decode workers."""
# flag, key, metavar, help; what every other setting needs is `--set`.
FLAGS = (
    ("--name", "name", "NAME", "which cluster of this host (default: headrace)"),
    ("--prefill", "prefill_workers", "N", "prefill workers"),
    ("--decode", "decode_workers", "N", "decode workers"),
    ("--routers", "routers", "N", "routers behind one port"),
    (ONE_POOL, "workers", "N", "one pool of N workers that prefill and decode; no prefill workers"),
    ("--model", "model", "MODEL", "GGUF file, Hugging Face directory, or OWNER/NAME of the hub (default: a demo)"),
    (
        "--served-model-name",
        "router.served_model_names",
        "NAME,NAME",
        "names that callers may give as `model` (default: that of the file or folder)",
    ),
    (
        "--generation-config",
        "router.generation_config",
        "model|off",
        "sampling of requests that name none: the model's (default), or temperature 1",
    ),
    ("--chat-template", "router.chat_template", "FILE", "a chat template in place of the model's own"),
    ("--tool-parser", "router.tool_parser", "PARSER", "how the model writes calls of tools (default: auto)"),
    ("--reasoning-parser", "router.reasoning_parser", "PARSER", "how its reasoning is told apart (default: auto)"),
    ("--launcher", "launcher", "ray|process", "what starts the workers"),
    ("--host", "router.host", "ADDRESS", "address the router listens on"),
    ("--grpc-port", "router.grpc_port", "PORT", "gRPC port; 0 takes a free one"),
    ("--http-port", "router.http_port", "PORT", "HTTP port; 0 takes a free one, -1 means none"),
    ("--log-level", "log_level", "LEVEL", "debug, info, warning or error"),
)


class Setting(msgspec.Struct, frozen=True):
    """A resolved value and its origin, as `headrace dump-config` prints it."""

    key: str
    value: object
    origin: str

    @property
    def public(self) -> object:
        """Return the value; of a secret only whether it is set."""
        return "(set)" if self.key.endswith("_key") and self.value else self.value


class Resolved(msgspec.Struct, frozen=True):
    config: ClusterConfig
    settings: tuple[Setting, ...]


def add_flags(parser: argparse.ArgumentParser, only: Collection[str] = ()) -> None:
    """Add the configuration flags to a verb; with `only`, no flags of their own but for these keys."""
    group = parser.add_argument_group("configuration")
    group.add_argument("--config", metavar="FILE", type=Path, help="TOML file")
    for flag, key, metavar, text in FLAGS:
        if only and key not in only:
            continue
        group.add_argument(flag, dest=f"set:{key}", metavar=metavar, help=text)
    group.add_argument(
        "--set",
        dest="set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="any setting that `headrace dump-config` lists; engine.KEY, transfer.KEY and tiers.KEY set both pools'",
    )


def resolve(
    arguments: argparse.Namespace, environ: Mapping[str, str], device: str = ""
) -> Resolved:
    """Resolve every setting. With `device`, both pools are on it, whatever the settings say. An `engine.dtype` of
    "auto" stays so on a GPU, as nothing is read here but the file of settings: see `settled`.

    Raises ConfigError with one line that names the key and its origin."""
    known = {key: (kind, default) for key, kind, default in fields()}
    values = {key: default for key, (_, default) in known.items()}
    origins = dict.fromkeys(known, "default")
    file: Path | None = arguments.config
    sources = [
        (_from_file(file), False) if file is not None else (iter(()), False),
        (_from_environment(environ), True),
        (_from_flags(arguments), True),
    ]
    for source, is_text in sources:
        for key, raw, origin in source:
            if key not in known:
                raise ConfigError(f"{origin}: unknown setting {key!r}{_suggestion(key, known)}")
            values[key] = _convert(key, raw, known[key][0], origin, is_text)
            origins[key] = origin
    if not values["prefill_workers"]:
        # Nobody is of that pool: it agrees with the other one, unless it is told otherwise.
        for name in ("device", "dtype", "kv_dtype", "layer_groups", "tensor_parallel"):
            ours, theirs = f"prefill.engine.{name}", f"decode.engine.{name}"
            if origins[ours] == "default" != origins[theirs]:
                values[ours], origins[ours] = values[theirs], "computed: no prefill workers, as decode"
    devices = {_pool(key): device or str(values[key]) for key in DEVICE_KEYS}
    values |= {f"{pool}.engine.device": device for pool, device in devices.items()}
    for key, default in defaults_on(devices).items():
        if origins[key] == "default":
            values[key], origins[key] = default, "default for cuda"
    for key, value in values.items():
        reason = problem(key, value)
        if reason is not None:
            raise ConfigError(f"{key} ({origins[key]}): {reason}")
    _work_out(values, origins, devices)
    return _agreed(values, origins)


def settled(resolved: Resolved) -> Resolved:
    """Replace each `engine.dtype` that is "auto" on a GPU by the type that the model's headers say. Raises ConfigError
    where the pools then differ, and ModelError."""
    values = {setting.key: setting.value for setting in resolved.settings}
    origins = {setting.key: setting.origin for setting in resolved.settings}
    open_keys = [key for key in DTYPE_KEYS if values[key] == "auto"]
    if not open_keys:
        return resolved
    stored = stored_in(resolved.config.model)
    for key in open_keys:
        values[key], origins[key] = gpu_dtype(stored), f"{origins[key]}, stored as {stored}"
    return _agreed(values, origins)


def _work_out(
    values: dict[str, object], origins: dict[str, str], devices: Mapping[Pool, str]
) -> None:
    """Set what nobody has set from the machine and the number of workers."""
    config = build(values)
    workers = config.prefill_workers + config.decode_workers
    processes = config.prefill_workers * config.prefill.engine.tensor_parallel
    processes += config.decode_workers * config.decode.engine.tensor_parallel
    for key, pool_bytes in MEMORY_KEYS.items():
        on_cpu = devices[_pool(key)] == "cpu"
        if origins[key] == "default" and values[pool_bytes] == "auto" and on_cpu:
            values[key] = available_bytes() // workers
            origins[key] = f"computed: available memory / {workers} workers"
    for key in THREAD_KEYS:
        if origins[key] == "default":
            values[key] = default_threads(processes)
            origins[key] = f"computed: cores / {workers} workers"
            if processes > workers:
                origins[key] = f"computed: cores / {processes} ranks of {workers} workers"
    if not config.prefill_workers and origins["decode.local_chunk_tokens"].startswith("default"):
        values["decode.local_chunk_tokens"] = config.prefill.chunk_tokens
        origins["decode.local_chunk_tokens"] = "computed: no prefill workers, a prefill worker's chunk"
    if origins["decode.itl_target_ms"] == "default" and shares_cores(config):
        values["decode.itl_target_ms"] = "auto"
        origins["decode.itl_target_ms"] = "computed: both pools lend each other cores"
    for pool, (share_key, drain_key) in SHARE_KEYS.items():
        share = device_share(config, pool)
        for key, default, more in ((share_key, 1.0, share), (drain_key, NcclConfig().drain_s, 1.0 / share)):
            if origins[key] == "default" and share < 1.0:
                values[key] = default * more
                origins[key] = f"computed: a worker has {share:.2g} of a GPU"
    for key in DTYPE_KEYS:
        if values[key] == "auto" and devices[_pool(key)] == "cpu":
            values[key], origins[key] = CPU_DTYPE, f"{origins[key]} for cpu"
        elif values[key] == "auto":
            origins[key] += " for cuda"


def _agreed(values: dict[str, object], origins: dict[str, str]) -> Resolved:
    """Check that the settings go together. Raises ConfigError."""
    config = build(values)
    prefill, decode = config.prefill.engine, config.decode.engine
    kinds = (("dtype", prefill.dtype, decode.dtype), ("kv_dtype", *map(_kept, (prefill, decode))))
    for name, one, other in kinds:
        ours, theirs = f"prefill.engine.{name}", f"decode.engine.{name}"
        if one != other and "auto" not in (one, other):
            raise ConfigError(
                f"{ours} ({origins[ours]}) is {values[ours]!r} but {theirs} ({origins[theirs]}) "
                f"is {values[theirs]!r}: both pools must agree"
            )
    if (reason := draft_problem(decode)) is not None:
        raise ConfigError(f"decode.engine.speculation ({origins['decode.engine.speculation']}) {reason}")
    if config.prefill_workers:
        _agreed_on_groups(prefill, decode, origins)
    for pool in POOLS:
        ours, theirs = f"{pool}.engine.deterministic", f"{pool}.transfer.wire"
        if values[ours] == "on" and values[theirs] != AS_STORED:
            raise ConfigError(
                f"{ours} ({origins[ours]}) is 'on' but {theirs} ({origins[theirs]}) is {values[theirs]!r}: "
                "what has travelled in 8 bits is not what would be computed again"
            )
    settings = tuple(Setting(key, values[key], origins[key]) for key in origins)
    return Resolved(config, settings)


def _agreed_on_groups(prefill: EngineConfig, decode: EngineConfig, origins: dict[str, str]) -> None:
    """Check that workers of both pools will understand each other's layer groups. Raises ConfigError."""
    ours, theirs = "prefill.engine.{}", "decode.engine.{}"
    name, one, other = "layer_groups", str(prefill.layer_groups), str(decode.layer_groups)
    if prefill.groups_layers != decode.groups_layers:
        why = "both pools must keep layers alike"
    elif prefill.groups_layers and prefill.block_size != decode.block_size:
        name, one, other = "block_size", str(prefill.block_size), str(decode.block_size)
        why = "with engine.layer_groups on, both pools must have blocks of one size"
    else:
        return
    ours, theirs = ours.format(name), theirs.format(name)
    raise ConfigError(f"{ours} ({origins[ours]}) is {one} but {theirs} ({origins[theirs]}) is {other}: {why}")


def _kept(engine: EngineConfig) -> str:
    return engine.kv_dtype_of(engine.dtype)


def _pool(key: str) -> Pool:
    return "prefill" if key.startswith("prefill.") else "decode"


def _from_flags(arguments: argparse.Namespace) -> Iterator[tuple[str, object, str]]:
    for assignment in arguments.set:
        key, equals, raw = assignment.partition("=")
        if not equals:
            raise ConfigError(f"flag --set: {assignment!r} is not KEY=VALUE")
        name = key.strip().replace("-", "_")
        # What both pools have may be set for both.
        for pool in ("prefill.", "decode.") if name.startswith(("engine.", "transfer.", "tiers.")) else ("",):
            yield f"{pool}{name}", raw.strip(), "flag --set"
    given = {flag: raw for flag, key, _, _ in FLAGS if (raw := getattr(arguments, f"set:{key}", None)) is not None}
    for flag, key, _, _ in FLAGS:
        if flag in given and flag != ONE_POOL:
            if ONE_POOL in given and key in ("prefill_workers", "decode_workers"):
                raise ConfigError(f"flag {ONE_POOL}: one pool has no {flag}")
            yield key, given[flag], f"flag {flag}"
    if ONE_POOL in given:
        yield "prefill_workers", "0", f"flag {ONE_POOL}"
        yield "decode_workers", given[ONE_POOL], f"flag {ONE_POOL}"


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, object, str]]:
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and name not in VARIABLES and not _is_service_link(name, environ[name]):
            key = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            yield key, environ[name], f"variable {name}"


def _is_service_link(name: str, value: str) -> bool:
    """Return True for a variable by which Kubernetes tells every pod where a service named headrace is reached."""
    return _SERVICE.fullmatch(name) is not None or (name.endswith("_PORT") and value.startswith(("tcp://", "udp://")))


def _from_file(path: Path) -> Iterator[tuple[str, object, str]]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"file {path}: {error}") from error
    sections = {key.rpartition(".")[0] for key, _, _ in fields()}
    sections |= {section.rpartition(".")[0] for section in sections}
    yield from _walk(tree, "", f"file {path}", sections)


def _walk(
    tree: Mapping[str, Any], prefix: str, origin: str, sections: set[str]
) -> Iterator[tuple[str, object, str]]:
    for name, value in tree.items():
        key = prefix + name
        if isinstance(value, dict) and key in sections:
            yield from _walk(value, key + ".", origin, sections)
        else:
            yield key, value, origin


def _convert(key: str, raw: object, kind: Any, origin: str, is_text: bool) -> object:
    if is_text and kind is str:
        return raw
    if is_text and kind is bool and isinstance(raw, str):
        raw = raw.lower()
    if is_text and get_origin(kind) is tuple and isinstance(raw, str):
        raw = [name.strip() for name in raw.split(",") if name.strip()]
    try:
        value: object = msgspec.convert(raw, kind, strict=not is_text)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{key} ({origin}): {raw!r} is not {_described(kind)}") from error
    return value


def _described(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) is Union:
        return " or ".join(_described(part) for part in get_args(kind))
    if get_origin(kind) is tuple:
        return "a list of names"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(kind, f"a value of type {kind}")


def _suggestion(key: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
