"""Defaults by device: a CPU keeps its own, a GPU gets others, and whatever was said wins. Nothing here needs a GPU."""

import json
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from cluster.cli import __main__ as cli
from cluster.config import ClusterConfig, ConfigError, fields
from cluster.defaults import (
    DECODE_ON_GPU,
    ON_GPU,
    PREFILL_ON_GPU,
    WITH_GPU,
    defaults_on,
    device_share,
    gpu_dtype,
)
from cluster.processes.launch import prepare_model, specs
from cluster.processes.placement import RayConfig
from cluster.processes.prepare import model_source
from cluster.resolve import Resolved, settled
from engine.config import EngineConfig
from engine.model.config import ModelConfig, ModelError
from tests.cluster.test_config import origin, resolved
from tests.engine.model.quantized import Kind, write_model
from worker.config import DecodeConfig, PrefillConfig

ON_CUDA = ("--set", "prefill.engine.device=cuda", "--set", "decode.engine.device=cuda")
GPUS = ("--set", "ray.address=auto", *ON_CUDA)
"""The cluster of `deploy/ray/headrace-gpu.toml`: a card for each worker."""
WORKED_OUT = ("engine.threads", "engine.dtype", "decode.itl_target_ms")
EVERY_GPU_DEFAULT = {
    **{f"{pool}.{key}": value for pool in ("prefill", "decode") for key, value in ON_GPU.items()},
    **{f"prefill.{key}": value for key, value in PREFILL_ON_GPU.items()},
    **{f"decode.{key}": value for key, value in DECODE_ON_GPU.items()},
    **WITH_GPU,
}


def values(result: Resolved) -> dict[str, object]:
    return {setting.key: setting.value for setting in result.settings}


def gguf(folder: Path, kind: Kind) -> str:
    return write_model(folder / f"{kind.name}.gguf", lambda name: kind)


def directory(folder: Path, **said: object) -> str:
    """A model of which only its configuration is there: all that is read."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(said))
    return str(folder)


def test_a_cpu_keeps_the_defaults_of_the_structs() -> None:
    """Guards a CPU's figures, and its bits, against what is good for a GPU."""
    result = settled(resolved())
    for key, _, default in fields():
        if not key.endswith(WORKED_OUT):
            assert values(result)[key] == default, key
    config = result.config
    assert (config.prefill.chunk_tokens, config.decode.max_batch) == (128, 32)
    assert (config.decode.max_handoffs, config.decode.local_chunk_tokens) == (16, 64)
    assert config.decode.itl_target_ms == "auto"
    for engine in (config.prefill.engine, config.decode.engine):
        assert (engine.dtype, engine.block_size, engine.pool_bytes) == ("float32", 16, 384 << 20)
    assert origin(result, "decode.engine.dtype") == "default for cpu"


def test_a_gpu_has_its_own(tmp_path: Path) -> None:
    """Guards against an 8B model in 32 bits, and against a batch that fills a tenth of a card."""
    result = settled(resolved(*GPUS, "--model", gguf(tmp_path, Kind.Q4_K)))
    found = values(result)
    for key, value in EVERY_GPU_DEFAULT.items():
        assert (found[key], origin(result, key)) == (value, "default for cuda"), key
    config = result.config
    assert 2048 <= config.prefill.chunk_tokens <= 8192 and config.decode.max_batch == 256
    assert config.prefill.engine.pool_bytes == "auto" and config.decode.engine.block_size == 64
    assert config.decode.engine.memory_bytes == 0, "the host's, of which a GPU's pool takes nothing"
    changed = {key for key, _, default in fields() if found[key] != default}
    said = {"ray.address", "model", "prefill.engine.device", "decode.engine.device"}
    assert changed == {*EVERY_GPU_DEFAULT, *said, "prefill.engine.dtype", "decode.engine.dtype"}


def test_the_table_names_settings_and_changes_each() -> None:
    """Guards against a slip in a key, which would be one more setting that nobody reads."""
    known = {key: (kind, default) for key, kind, default in fields()}
    for key, value in EVERY_GPU_DEFAULT.items():
        kind, default = known[key]
        allowed = get_args(kind) or (kind,)
        assert type(value) in allowed or value in get_args(allowed[-1]), key
        assert value != default, key
    assert defaults_on({"prefill": "cpu", "decode": "cpu"}) == {}
    assert defaults_on({"prefill": "cuda", "decode": "cuda:1"}) == EVERY_GPU_DEFAULT


def test_what_is_said_wins(tmp_path: Path) -> None:
    """Guards against a default that overrules a setting, also one that asks for what a CPU has by itself."""
    file = tmp_path / "c.toml"
    file.write_text("start_timeout_s = 180.0\n[prefill]\nchunk_tokens = 128\n")
    flags = ("--config", str(file), "--set", "decode.engine.pool_bytes=402653184", *GPUS)
    result = resolved(*flags, HEADRACE_DECODE__MAX_BATCH="32", HEADRACE_PREFILL__ENGINE__THREADS="2")
    config = result.config
    assert (config.start_timeout_s, config.prefill.chunk_tokens) == (180.0, 128)
    assert (config.decode.max_batch, config.decode.engine.pool_bytes) == (32, 384 << 20)
    assert (config.prefill.engine.threads, config.decode.engine.threads) == (2, 4)
    assert origin(result, "decode.max_batch") == "variable HEADRACE_DECODE__MAX_BATCH"
    assert origin(result, "decode.max_handoffs") == "default for cuda"


def test_each_pool_has_those_of_its_own_device() -> None:
    """Guards against a CPU pool beside a GPU pool that plans with chunks of thousands of tokens."""
    config = resolved("--set", "decode.engine.device=cuda:1").config
    assert (config.prefill.chunk_tokens, config.prefill.engine.block_size) == (128, 16)
    assert (config.decode.max_batch, config.decode.engine.block_size) == (256, 64)
    assert config.router.retry_reserve == 4 * config.decode.max_batch


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (Kind.Q4_K, "bfloat16"),
        (Kind.F16, "float16"),
        (Kind.BF16, "bfloat16"),
        (Kind.F32, "bfloat16"),
    ],
)
def test_a_gpu_computes_in_the_checkpoints_own_16_bits(
    kind: Kind, dtype: str, tmp_path: Path
) -> None:
    """Guards against pools, and a prepared model, that each make up their own minds."""
    cache = ("--set", f"cache_dir={tmp_path / 'cache'}")
    result = settled(resolved(*GPUS, *cache, "--model", gguf(tmp_path, kind)))
    stored = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(kind.name, kind.name)
    for pool in ("prefill", "decode"):
        assert values(result)[f"{pool}.engine.dtype"] == dtype
        assert origin(result, f"{pool}.engine.dtype") == f"default for cuda, stored as {stored}"
    folder = prepare_model(result.config)
    assert ModelConfig.load(Path(folder)).dtype == dtype
    for spec in specs(result.config, folder)[:-1]:
        told = msgspec.convert(spec.config["engine"], EngineConfig)
        assert told.in_dtype(dtype) == told and told.kv_dtype_of(told.dtype) == dtype


def test_a_directory_says_it_in_its_configuration(tmp_path: Path) -> None:
    for said, dtype in (("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")):
        named = directory(tmp_path / said, torch_dtype=said)
        assert settled(resolved(*GPUS, "--model", named)).config.prefill.engine.dtype == dtype
    assert gpu_dtype("F8_E4M3") == "bfloat16"


def test_float32_on_a_gpu_has_to_be_said(tmp_path: Path) -> None:
    """Guards a user's word: float32 is taken as said, and the model is not even looked at."""
    said = [f"--set={pool}.engine.dtype=float32" for pool in ("prefill", "decode")]
    config = settled(resolved(*GPUS, *said, "--model", "/nowhere.gguf")).config
    assert config.decode.engine.dtype == "float32" and model_source(config).dtype == "float32"
    auto = settled(resolved("--set", "prefill.engine.dtype=auto", "--model", "/nowhere.gguf"))
    assert auto.config.prefill.engine.dtype == "float32"
    assert origin(auto, "prefill.engine.dtype") == "flag --set for cpu"
    with pytest.raises(ModelError, match=r"/nowhere\.gguf"):
        settled(resolved(*GPUS, "--model", "/nowhere.gguf"))


def test_pools_that_would_compute_in_different_types_are_refused(tmp_path: Path) -> None:
    """Guards against workers that only find out when they connect."""
    model = ("--model", directory(tmp_path / "model", dtype="bfloat16"))
    with pytest.raises(
        ConfigError,
        match=r"prefill\.engine\.dtype \(default for cpu\) is 'float32' but decode\.engine\.dtype "
        r"\(default for cuda, stored as bfloat16\) is 'bfloat16': both pools must agree",
    ):
        settled(resolved("--set", "decode.engine.device=cuda", *model))
    with pytest.raises(ConfigError, match=r"kv_dtype \(flag --set\) is 'float16' but"):
        settled(resolved(*GPUS, *model, "--set", "prefill.engine.kv_dtype=float16"))
    one_said = settled(resolved(*GPUS, *model, "--set", "prefill.engine.dtype=bfloat16"))
    assert one_said.config.decode.engine.dtype == "bfloat16"


def test_a_configuration_made_in_python_is_settled_too(tmp_path: Path) -> None:
    """Guards the way around the settings: a model must not be prepared in 32 bits because nobody resolved them."""
    engine = EngineConfig(device="cuda")
    config = ClusterConfig(
        model=gguf(tmp_path, Kind.F16),
        prefill=PrefillConfig(engine=engine),
        decode=DecodeConfig(engine=engine),
    )
    assert model_source(config).dtype == "float16"
    assert model_source(ClusterConfig()).dtype == "float32"
    mixed = msgspec.structs.replace(config, prefill=PrefillConfig())
    with pytest.raises(ConfigError, match=r"'float32' and decode\.engine\.dtype 'float16'"):
        model_source(mixed)


@pytest.mark.parametrize(
    ("changes", "prefill", "decode"),
    [
        ({}, 1 / 3, 1 / 3),
        ({"launcher": "process"}, 1 / 3, 1 / 3),
        ({"prefill_device": "cuda:1"}, 1.0, 1 / 2),
        ({"prefill_device": "cuda:0"}, 1 / 3, 1 / 3),
        ({"prefill_device": "cpu"}, 1.0, 1 / 2),
        ({"ray": RayConfig(address="auto")}, 1.0, 1.0),
        ({"ray": RayConfig(address="auto", gpus_per_worker=0.25)}, 0.25, 0.25),
        ({"ray": RayConfig(address="auto", gpus_per_worker=0)}, 1.0, 1.0),
        ({"ray": RayConfig(address="auto", gpus_per_worker=2)}, 1.0, 1.0),
    ],
)
def test_workers_of_one_card_share_its_memory(
    changes: dict[str, object], prefill: float, decode: float
) -> None:
    """Guards against a first worker that takes the card whole, so that the second finds no room for a block."""
    rest = dict(changes)
    device = str(rest.pop("prefill_device", "cuda"))
    config = ClusterConfig(
        prefill_workers=1,
        decode_workers=2,
        prefill=PrefillConfig(engine=EngineConfig(device=device)),
        decode=DecodeConfig(engine=EngineConfig(device="cuda")),
        **rest,  # type: ignore[arg-type]
    )
    assert (device_share(config, "prefill"), device_share(config, "decode")) == (prefill, decode)


def test_the_share_is_worked_out_and_can_be_said() -> None:
    two = resolved("--launcher", "process", *ON_CUDA)
    assert two.config.decode.engine.device_share == 0.5
    assert origin(two, "decode.engine.device_share") == "computed: a worker has 0.5 of a GPU"
    said = resolved("--launcher", "process", *ON_CUDA, "--set", "decode.engine.device_share=0.7")
    assert said.config.decode.engine.device_share == 0.7
    assert resolved(*GPUS).config.decode.engine.device_share == 1.0


def test_dump_config_shows_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["dump-config", *GPUS, "--model", gguf(tmp_path, Kind.BF16)]) == 0
    shown = capsys.readouterr().out
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in shown.splitlines()}
    assert rows["decode.max_batch"] == "256 # default for cuda"
    assert rows["prefill.engine.dtype"] == '"bfloat16" # default for cuda, stored as bfloat16'
    assert rows["decode.growth_tokens"] == "64 # default"


def test_a_model_that_is_elsewhere_leaves_the_type_open(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the laptop from which a cluster is configured whose model lies on its hosts alone."""
    assert cli.main(["dump-config", *GPUS, "--model", "/models/elsewhere"]) == 0
    shown = capsys.readouterr()
    assert "decode.engine.dtype" in shown.out and '"auto"' in shown.out
    assert "engine.dtype is not known here: /models/elsewhere" in shown.err
    assert cli.main(["up", *GPUS, "--model", "/models/elsewhere"]) == 1


def test_the_example_file_leaves_them_alone() -> None:
    """Guards whoever copies it and puts `cuda` in: a CPU's numbers, written down there, would win."""
    example = Path(__file__).parents[2] / "examples" / "headrace.toml"
    found = values(resolved("--config", str(example), *ON_CUDA))
    assert {key: found[key] for key in EVERY_GPU_DEFAULT} == EVERY_GPU_DEFAULT


def test_pools_whose_layer_groups_differ_are_refused() -> None:
    """Guards a cluster that starts, and of which no worker can take another's blocks: one pool alone keeps layers in
    groups, or both do in blocks of different sizes."""
    with pytest.raises(
        ConfigError,
        match=r"prefill\.engine\.layer_groups \(.*\) is off but decode\.engine\.layer_groups \(flag --set\) is on: "
        "both pools must keep layers alike",
    ):
        resolved("--set", "prefill.engine.layer_groups=off", "--set", "decode.engine.layer_groups=on")
    on = ("--set", "engine.layer_groups=on")
    with pytest.raises(ConfigError, match=r"block_size \(flag --set\) is 32 but .* is 16: .* blocks of one size"):
        resolved(*on, "--set", "prefill.engine.block_size=32")
    assert resolved(*on, "--set", "engine.block_size=32").config.prefill.engine.groups_layers
    alone = ("--prefill", "0")
    assert resolved(*alone, *on, "--set", "prefill.engine.block_size=32").config.decode.engine.groups_layers
    one_pool = resolved(*alone, "--set", "decode.engine.layer_groups=on")
    assert values(one_pool)["prefill.engine.layer_groups"] == "on"
