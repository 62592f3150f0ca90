"""`headrace plan` as it is typed: flags, models, text, JSON, exit statuses, and the check against workers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from cluster.cli import __main__ as cli
from cluster.config import ClusterConfig, ConfigError
from cluster.plan.check import compare
from cluster.plan.held import held_bytes, kinds_at_hand
from cluster.plan.planner import Pool, pool_of, token_sizes
from cluster.plan.shapes import find_shape
from cluster.processes.prepare import prepare_model
from cluster.sizes import format_size, parse_share, parse_size
from engine.config import EngineConfig
from engine.messages import MemoryUse, WorkerInfo
from engine.model.config import CONFIG_FILE, ModelConfig, ModelError
from engine.model.families import FAMILIES, REFUSED
from engine.model.llama import Llama
from engine.model.prepared.cache import prepare
from engine.model.prepared.loading import load_weights
from tests.engine.model import hf_quantized as packing
from tests.engine.model.checkpoints import build
from tests.engine.model.quantized import Kind, write_model
from tests.engine.model.test_quantized_families import save_both
from tests.router.fake_cluster import worker_info
from worker.config import DecodeConfig, PrefillConfig

SHAPE = ("--layers", "80", "--kv-heads", "8", "--head-dim", "128", "--context", "8192")
LLAMA = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"type": "yarn", "factor": 4.0},
    "vocab_size": 152064,
}
GIB = 1 << 30
FAMILIES_OF_CONFIGS = {family.hugging_face for family in FAMILIES.values()}


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert cli.main(["plan", "--json", *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_worked_example_as_it_is_typed(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*SHAPE, "--tp", "2", "--kv-memory", "8GiB", "--tail", "4%"]
    assert cli.main(["plan", *flags, "--lengths", "600,1250,4000,128", "--requests", "128"]) == 0
    text = capsys.readouterr().out
    assert "a token            320 KiB; on each rank 160 KiB" in text
    assert "8,192 tokens: 2.5 GiB; on each rank 1.25 GiB" in text
    assert "128 requests       320 GiB" in text
    assert "requests of 8,192  6" in text
    assert "10 GiB    81.8% wasted" in text
    assert "weights            not known" in text


def test_json_has_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, *SHAPE, "--kv-dtype", "int8", "--kv-memory", "8GB")
    assert found["sizes"]["token_bytes"] == 2 * 80 * 8 * (128 + 4)
    assert found["kv_dtype"] == "int8"
    (pool,) = found["pools"]
    assert pool["blocks"] == 8 * 10**9 // found["sizes"]["rank_block_bytes"]
    assert found["waste"] is None and found["weights_bytes"] is None


def test_a_gpu_is_shared_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a pool that gets what weights, workspace or reserve need."""
    flags = ["--model", "meta-llama/Llama-3.1-70B-Instruct", "--tp", "4", "--context", "32768"]
    found = plan(capsys, *flags, "--gpu-memory", "80GiB")
    (pool,) = found["pools"]
    assert pool["reserve_bytes"] == 8 * GIB
    assert 70_553_706_496 * 2 / 4 < pool["weights_bytes"] < 33 * GIB
    assert 0 < pool["workspace_bytes"] < GIB
    rest = 72 * GIB - pool["weights_bytes"] - pool["workspace_bytes"]
    assert rest - found["sizes"]["rank_block_bytes"] < pool["kv_bytes"] <= rest
    assert pool["requests"] == 15
    given = plan(
        capsys, *flags, "--gpu-memory", "80GiB", "--reserve", "1GiB", "--workspace", "1GiB",
        "--weights", "38GiB",
    )  # fmt: skip
    assert given["pools"][0]["requests"] == 40 // 2.5


def test_what_does_not_fit_is_said_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "llama-3-70b", "--gpu-memory", "80GiB", "--workspace", "1GiB"]
    assert cli.main(["plan", *flags]) == 1
    assert "GPU: 60.44 GiB short of a single block" in capsys.readouterr().out


def test_the_configured_pools_are_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--workspace", "100MiB", "--set", "decode.engine.pool_bytes=auto"]
    flags += ["--set", "decode.engine.memory_bytes=3000000000"]
    found = plan(capsys, *flags)
    prefill, decode = found["pools"]
    assert (prefill["name"], prefill["blocks"], prefill["tokens"]) == ("prefill", 546, 8736)
    left = 3_000_000_000 - (512 << 20) - prefill["weights_bytes"] - (100 << 20)
    left -= 128 << 20  # the host tier
    assert decode["blocks"] == left // (720 << 10)
    assert found["model"]["layers"] == 30 and found["dtype"] == "float32"


@pytest.mark.parametrize(
    ("stored", "dtype"), [("F16", "float16"), ("Q4_K", "bfloat16"), ("F32", "bfloat16")]
)
def test_a_gpu_is_planned_as_its_workers_would_have_it(
    stored: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a plan in 32 bits, and in a CPU's small blocks, chunks and batches, for a card."""
    model = write_model(tmp_path / "model.gguf", lambda name: Kind[stored])
    # What its largest step takes, which is long to work out, is that of test_the_largest_step_of_a_gpu_is_planned.
    card = ["--model", model, "--gpu-memory", "1GiB", "--workspace", "100MiB"]
    for flags in (card, ["--model", model, "--kv-memory", "1GiB"]):
        found = plan(capsys, *flags)
        assert (found["dtype"], found["kv_dtype"], found["sizes"]["block_size"]) == (dtype, dtype, 64)
    asked = plan(capsys, *card, "--dtype", "float32")
    # Of codes there are 6 bits a weight, and 32 where they are widened; the rest doubles.
    factor = 5 if stored == "Q4_K" else 2
    assert asked["weights_bytes"] == pytest.approx(factor * found["weights_bytes"], rel=0.05)
    cpu = [f"--set={pool}.engine.device=cpu" for pool in ("prefill", "decode")]
    assert plan(capsys, *card, *cpu)["sizes"]["block_size"] == 64
    said = [f"--set={pool}.engine.dtype=float32" for pool in ("prefill", "decode")]
    assert plan(capsys, *card, *said)["dtype"] == "float32"
    if stored == "F32":
        assert plan(capsys, "--model", model)["sizes"]["block_size"] == 16, "the pools of this CPU"


def test_the_largest_step_of_a_gpu_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against KV memory that a worker's chunk of 4,096 and batch of 256 then take away."""
    flags = ["--model", "llama-3.1-8b", "--context", "8192", "--gpu-memory", "80GiB"]
    (large,) = plan(capsys, *flags)["pools"]
    cpu = ["--set", "prefill.chunk_tokens=128", "--set", "decode.max_batch=32"]
    (small,) = plan(capsys, *flags, *cpu)["pools"]
    # Gate and up of 14,336 each, in 16 bits, for every token of the step; logits in 32 bits for every row.
    assert large["workspace_bytes"] > (4096 + 256) * 2 * 14336 * 2 + 257 * 128256 * 4
    assert small["workspace_bytes"] < 100 << 20


def test_a_config_json_without_weights_says_its_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for said, dtype in (("float16", "float16"), ("float32", "bfloat16"), (None, "bfloat16")):
        (tmp_path / CONFIG_FILE).write_text(json.dumps({**LLAMA, "torch_dtype": said}))
        found = plan(capsys, "--model", str(tmp_path), "--gpu-memory", "80GiB", "--workspace", "1GiB")
        assert found["dtype"] == dtype


def test_the_configured_pools_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a card's pool that is sized by the host's memory."""
    flags = [f"--set={pool}.engine.device=cuda" for pool in ("prefill", "decode")]
    assert cli.main(["plan", *flags]) == 2
    why = "flag --gpu-memory: needed, since prefill.engine.pool_bytes is 'auto' on cuda"
    assert why in capsys.readouterr().err
    flags += [f"--set={pool}.engine.pool_bytes=1000000000" for pool in ("prefill", "decode")]
    found = plan(capsys, *flags)
    assert found["dtype"] == "bfloat16", "the demo's file is quantized"
    assert [pool["blocks"] for pool in found["pools"]] == [10**9 // (64 * 30 * 2 * 3 * 64 * 2)] * 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layers", "x"], "flag --layers: 'x' is not a whole number of at least 1"),
        (["--tp", "0"], "flag --tp: '0' is not a whole number of at least 1"),
        (["--gpu-memory", "80Q"], "flag --gpu-memory: '80Q' is not a size such as 80GiB"),
        (["--tail", "120%"], "flag --tail: '120%' is all or more"),
        (["--kv-dtype", "fp7"], "flag --kv-dtype: 'fp7' is not one of float32"),
        (["--lengths", "3,,4"], "flag --lengths: '' is not a whole number"),
        (["--context", "16777217"], "flag --context: '16777217' exceeds 16777216\n"),
        (["--context", "9" * 5000], "flag --context: '999999999999999999999999'… exceeds 16777216\n"),
        (["--set", "context_tokens=16777217"], "context_tokens: 16777217 exceeds 16777216\n"),
        (["--gpu-memory", "9" * 400 + "GiB"], "flag --gpu-memory: '999999999999999999999999'… is larger than any mem"),
        (["--kv-memory", "8388608TiB"], "flag --kv-memory: '8388608TiB' is larger than any memory\n"),
        ([*SHAPE, "--lengths", "8193"], "flag --lengths: 8193 exceeds the context of 8192"),
        (list(SHAPE[:6]), "flag --context: needed"),
        (["--model", "lama-3-8b"], "did you mean llama-3-8b?"),
        (["--check", "--tp", "2"], "flag --tp: --check starts what is configured"),
        (["--set", "decode.engine.pool_bytes=lots"], "is not a whole number or one of auto"),
    ],
)
def test_wrong_flags_are_one_line(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    """Guards against a traceback, or a plan for something else than was asked."""
    assert cli.main(["plan", *flags]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_a_config_json_of_a_family_that_cannot_be_run(tmp_path: Path) -> None:
    """A plan needs sizes alone: Qwen's biases count, its stretched positions do not matter."""
    (tmp_path / CONFIG_FILE).write_text(json.dumps(LLAMA))
    for named in (tmp_path, tmp_path / CONFIG_FILE):
        shape = find_shape(str(named))
        assert (shape.layers, shape.kv_heads, shape.head_dim) == (28, 4, 128)
        published = find_shape("Qwen/Qwen2.5-7B-Instruct")
        assert shape.model is not None and published.model is not None
        sizes = msgspec.structs.replace(shape.model, name="", norm_eps=1e-5)
        assert sizes == msgspec.structs.replace(published.model, name="", ropes=shape.model.ropes)


def test_a_prepared_model_is_read(tmp_path: Path) -> None:
    published = find_shape("llama-3.2-1b").model
    assert published is not None
    (tmp_path / CONFIG_FILE).write_bytes(msgspec.json.encode(published))
    assert find_shape(str(tmp_path)).model == published == ModelConfig.load(tmp_path)


@pytest.mark.parametrize("key", ["num_local_experts", "kv_lora_rank"])
def test_what_the_formula_does_not_hold_for_is_refused(
    tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a wrong plan for latent attention or experts, whose sizes follow other rules."""
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**LLAMA, key: 8}))
    assert cli.main(["plan", "--model", str(tmp_path)]) == 1
    assert key in capsys.readouterr().err


def test_sizes_are_read_and_written() -> None:
    texts = {"1": 1, "2 KiB": 2048, "1.5GiB": 3 << 29, "80GB": 80 * 10**9, "0.5 tib": 1 << 39}
    assert {text: parse_size(text) for text in texts} == texts
    for wrong in ("", "-1", "1e9", "GiB", "5 X", "1.GiB"):
        with pytest.raises(ValueError, match="not a size"):
            parse_size(wrong)
    assert [float(parse_share(text)) for text in ("4%", "0.04", "12.5%", "0")] == [
        0.04,
        0.04,
        0.125,
        0,
    ]
    shown = [format_size(size) for size in (0, 1023, 1024, 5 << 28, 160 << 20, 1 << 50)]
    assert shown == ["0 B", "1,023 B", "1 KiB", "1.25 GiB", "160 MiB", "1,024 TiB"]


def test_a_deviation_beyond_five_percent_is_found() -> None:
    """Guards against a check that passes whatever the worker does."""
    sizes = token_sizes(find_shape("smollm2-135m"), "float32", 16)
    pool = pool_of("decode", sizes, 512, kv_bytes=384 << 20, weights=1000, workspace=1000)

    def off(**found: int) -> list[str]:
        return [one.what for one in compare(pool, info(pool, **found)) if not one.fits]

    assert off() == []
    assert off(weights_bytes=955, workspace_bytes=1050) == []
    assert off(weights_bytes=940) == ["weights_bytes"]
    assert off(workspace_bytes=1060) == ["workspace_bytes"]
    assert off(workspace_bytes=0) == ["workspace_bytes"]
    assert off(kv_bytes=pool.kv_bytes * 9 // 10) == ["kv_bytes"]


def info(pool: Pool, **found: int) -> WorkerInfo:
    memory = {"weights_bytes": 1000, "workspace_bytes": 1000, "kv_bytes": pool.kv_bytes, **found}
    said = worker_info("decode-0", "decode", blocks=pool.blocks)
    return msgspec.structs.replace(said, memory=MemoryUse(**memory))


@pytest.mark.slow
def test_plan_and_workers_agree() -> None:
    """The demo model, one pool of given size and one sized from what is left: within five percent."""
    command = [sys.executable, "-m", "cluster.cli", "plan", "--check", "--json"]
    command += ["--set", "prefill.engine.pool_bytes=auto"]
    command += ["--set", "prefill.engine.memory_bytes=2000000000"]
    root = Path(__file__).parents[3]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    rows = {(row["worker"], row["what"]): row for row in json.loads(done.stdout)}
    assert len(rows) == 8
    for row in rows.values():
        assert row["found"] > 0 and abs(row["planned"] / row["found"] - 1) <= 0.05
    assert rows["decode", "blocks"]["found"] == 546
    # Each for its own largest step: a longer chunk there, a full batch here.
    assert rows["prefill", "workspace_bytes"]["found"] != rows["decode", "workspace_bytes"]["found"]


@pytest.mark.parametrize(
    "sizes",
    [{**LLAMA, "model_type": "stablelm"}, {"model_type": "gpt2", "n_layer": 12}],
    ids=["planned", "other names"],
)
def test_plan_and_up_agree_about_an_unknown_family(
    sizes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a plan for a model that `up` refuses, without a word of that, and against an error that does not
    say what there is. The weights are not looked at first: there are none."""
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    cli.main(["plan", "--model", str(tmp_path)])
    planned = capsys.readouterr()
    with pytest.raises(ModelError) as refused:
        prepare(str(tmp_path), tmp_path / "cache")
    told = f"unknown model_type {sizes['model_type']!r}; known: {', '.join(sorted(FAMILIES_OF_CONFIGS))}"
    assert told in str(refused.value)
    assert told in planned.out + planned.err


@pytest.mark.parametrize("kind", ["qwen3_next", "kimi_linear", "zamba2", "minimax", "llama4_text", "gemma3n_text"])
def test_what_keeps_other_things_than_keys_and_values_is_refused_by_name(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards a plan of blocks that no layer, or not each, would fill."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "model_type": kind}))
    assert cli.main(["plan", "--model", str(tmp_path)]) == 1
    assert f"config.json: model_type '{kind}' is not run: {REFUSED[kind]}" in capsys.readouterr().err


def test_plan_and_up_agree_about_ranks_that_a_model_does_not_divide_by(
    demo_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a plan that workers refuse, and a refusal after all of them have started: the demo has 9 heads."""
    engine = EngineConfig(tensor_parallel=2)
    told = "engine.tensor_parallel: 9 heads of SmolLM2-135M-Instruct do not divide by 2"
    for asked in (["--tp", "2"], ["--set", "engine.tensor_parallel=2"]):
        assert cli.main(["plan", *asked]) == 2
        assert told in capsys.readouterr().err
    config = ClusterConfig(
        cache_dir=str(demo_cache), prefill=PrefillConfig(engine=engine), decode=DecodeConfig(engine=engine)
    )
    with pytest.raises(ConfigError, match=told):
        prepare_model(config)


def test_layer_groups_are_planned_as_workers_have_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards a plan that counts windows' layers for all of a sequence, and blocks of another size than the worker's."""
    model = {
        **{key: value for key, value in LLAMA.items() if key != "rope_scaling"},
        "model_type": "gemma3_text", "head_dim": 256, "num_hidden_layers": 18, "num_key_value_heads": 1,
        "sliding_window": 512, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh", "num_attention_heads": 4,
        "layer_types": ["full_attention" if at % 6 == 5 else "sliding_attention" for at in range(18)],
    }
    (tmp_path / "config.json").write_text(json.dumps(model))
    flags = ("--model", str(tmp_path), "--context", "8192", "--dtype", "float32")
    on = [f"{role}.engine.layer_groups=on" for role in ("prefill", "decode")]
    whole = plan(capsys, *flags)
    grouped = plan(capsys, *flags, *(word for one in on for word in ("--set", one)))
    assert whole["request"]["blocks"] == 512 and whole["request"]["window_blocks"] == 0
    assert grouped["request"]["window_blocks"] == 5 * 33
    config = find_shape(str(tmp_path)).model
    assert config is not None
    for pool, before in zip(grouped["pools"], whole["pools"], strict=True):
        layout = config.kv_layout(16, "float32", grouped=True)
        assert pool["blocks"] == (384 << 20) // layout.block_bytes
        assert pool["blocks"] // 6 == before["blocks"]
        assert pool["requests"] >= 4 * max(1, before["requests"])
    assert cli.main(["plan", *flags, "--set", on[0], "--set", on[1]]) == 0
    assert "6 of up to 3 layers, a block table for each; 5 keep a window of 512 tokens" in capsys.readouterr().out


def test_a_quantized_mixture_on_a_gpu_is_planned_in_codes(tmp_path: Path) -> None:
    """Guards a plan that would leave room for experts in 16 bits, which a worker keeps as codes."""
    source, _ = save_both(build("mixtral"), tmp_path, packing.awq(32))
    folder = prepare(source, tmp_path / "cache", "bfloat16", mapped=False)
    shape, kinds = ModelConfig.load(folder), kinds_at_hand(source, "bfloat16")
    held = Llama(shape, load_weights(folder, torch.device("cpu")).weights)
    planned = held_bytes(shape, "bfloat16", kinds, "cuda", native=False)
    assert planned == held.weights_bytes + held.table_bytes
    in_full = {key: kind if "experts" not in key else "bfloat16" for key, kind in kinds.items()}
    assert held_bytes(shape, "bfloat16", in_full, "cuda", native=False) > 1.2 * planned
