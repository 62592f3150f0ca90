"""What GGUF headers of released models say of their layers, and what none says and the family's constants do."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.model.config import LinearRope, ModelError, YarnRope
from engine.model.files.gguf_model import GGUFModel
from engine.model.files.gguf_options import LONG_FACTORS, ROPE_FACTORS, HeaderSizes, Options, family_options
from engine.model.files.gguf_reader import GGUFFile

Number = int | float | str

GEMMA2_27B = HeaderSizes(layers=46, hidden=4608, heads=32, head_dim=128, vocab=256000)
GEMMA3_27B = HeaderSizes(layers=62, hidden=5376, heads=32, head_dim=128, vocab=262208)
MISTRAL_7B = HeaderSizes(layers=32, hidden=4096, heads=32, head_dim=128, vocab=32000)
FIRST_MISTRAL: dict[str, Number] = {
    "context_length": 32768,
    "feed_forward_length": 14336,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": 128,
}
OLMO3_YARN: dict[str, Number] = {
    "rope.freq_base": 500000.0,
    "attention.sliding_window": 4096,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 8192,
}


def save(folder: Path, architecture: str, header: dict[str, Number], tensor: str) -> Path:
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in header.items():
        name = f"{architecture}.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_float32(name, value)
    writer.add_tensor(tensor, np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def options(folder: Path, architecture: str, sizes: HeaderSizes, header: dict[str, Number]) -> Options:
    return family_options(GGUFFile(save(folder, architecture, header, "output_norm.weight")), architecture, sizes)


@pytest.mark.parametrize(
    ("architecture", "sizes", "scale"),
    [
        ("gemma2", GEMMA2_27B, 144**-0.5),
        ("gemma2", GEMMA2_27B._replace(layers=42, hidden=3584, heads=16, head_dim=256), 256**-0.5),
        ("gemma3", GEMMA3_27B, 168**-0.5),
        ("gemma3", GEMMA3_27B._replace(layers=48, hidden=3840, heads=16, head_dim=256), 256**-0.5),
    ],
)
def test_scores_of_gemma_27b_are_scaled_as_its_config_json_has_them(
    architecture: str, sizes: HeaderSizes, scale: float, tmp_path: Path
) -> None:
    """Guards `query_pre_attn_scalar`, which no file holds: by 1 / sqrt(head_dim) answers would be a little worse."""
    header: dict[str, Number] = {"attention.sliding_window": 1024, "rope.freq_base": 1e6}
    assert options(tmp_path, architecture, sizes, header)["attention_scale"] == pytest.approx(scale)


def test_mistral_7b_v01_has_its_window_back(tmp_path: Path) -> None:
    """Guards the window that the converter drops."""
    layers = options(tmp_path, "llama", MISTRAL_7B, FIRST_MISTRAL)["layer_options"]
    assert [layer.window for layer in layers] == [4096] * 32


@pytest.mark.parametrize(
    ("sizes", "other"),
    [
        (MISTRAL_7B, {"rope.freq_base": 1_000_000.0}),  # v0.2
        (MISTRAL_7B._replace(vocab=32768), {"rope.freq_base": 1_000_000.0}),  # v0.3
        (MISTRAL_7B, {"feed_forward_length": 11008, "context_length": 4096}),  # Llama 2 7B
        (MISTRAL_7B._replace(vocab=128256), {"context_length": 8192, "rope.freq_base": 500_000.0}),  # Llama 3 8B
    ],
)
def test_others_of_its_shape_have_no_window(sizes: HeaderSizes, other: dict[str, Number], tmp_path: Path) -> None:
    assert options(tmp_path, "llama", sizes, FIRST_MISTRAL | other)["layer_options"] == ()


@pytest.mark.parametrize("key", ["attn_factor", "yarn_attn_factor"])
def test_olmo_3_says_the_whole_factor_of_yarn(key: str, tmp_path: Path) -> None:
    """Guards released files, whose converter copies config.json's `attention_factor`."""
    sizes = HeaderSizes(layers=8, hidden=4096, heads=32, head_dim=128, vocab=100278)
    found = options(tmp_path, "olmo2", sizes, OLMO3_YARN | {f"rope.scaling.{key}": 1.25})
    assert isinstance(found["ropes"][0].scaling, YarnRope) and found["ropes"][0].scale == 1.25
    assert (found["ropes"][1].scaling, found["ropes"][1].scale) == (None, 1.0)
    assert [(layer.window, layer.rope) for layer in found["layer_options"]] == ([(4096, 1)] * 3 + [(0, 0)]) * 2


def test_a_factor_of_unknown_meaning_is_refused(tmp_path: Path) -> None:
    header = OLMO3_YARN | {"rope.scaling.attn_factor": 1.25, "attention.sliding_window": 0}
    with pytest.raises(ModelError, match=r"qwen3\.rope\.scaling\.attn_factor is not supported"):
        options(tmp_path, "qwen3", MISTRAL_7B, header)


@pytest.mark.parametrize("layers", [0, 10_001, 2**31 - 1])
def test_a_header_with_a_number_of_layers_that_no_model_has_is_refused(tmp_path: Path, layers: int) -> None:
    """Guards `headrace plan FILE` from a list of options for each of two thousand million layers."""
    sizes: dict[str, Number] = {"block_count": layers, "embedding_length": 64, "attention.head_count": 4}
    header = FIRST_MISTRAL | sizes | {"attention.layer_norm_rms_epsilon": 1e-5}
    path = save(tmp_path, "llama", header, "token_embd.weight")
    with pytest.raises(ModelError, match=f"layers is {layers}, must be 1 to 10000"):
        GGUFModel(path)


def test_a_tensor_without_values_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.ones((4, 0), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"tensor token_embd.weight has shape \[0, 4\]"):
        GGUFFile(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("granite", "embedding_scale", 0.0),
        ("granite", "residual_scale", -0.25),
        ("granite", "attention.scale", -1.0),
        ("granite", "logit_scale", 0.0),
        ("granite", "logit_scale", -8.0),
        ("gemma2", "attn_logit_softcapping", -50.0),
        ("gemma2", "final_logit_softcapping", -30.0),
        ("gemma3", "final_logit_softcapping", -30.0),
        ("mistral3", "attention.temperature_scale", -0.5),
    ],
)
@pytest.mark.parametrize("is_nan", [False, True])
def test_a_factor_that_is_not_above_0_is_refused(
    architecture: str, key: str, value: float, is_nan: bool, tmp_path: Path
) -> None:
    """Guards answers of nothing, or turned round, for a file's mistake: it is named with its field."""
    header: dict[str, Number] = {"attention.sliding_window": 0 if architecture in ("granite", "mistral3") else 1024}
    said = header | {key: float("nan") if is_nan else value}
    why = "nan, not a finite number" if is_nan else f"{value}, not a number above 0"
    with pytest.raises(ModelError, match=rf"model.gguf: metadata {architecture}\.{key} is {why}"):
        options(tmp_path, architecture, MISTRAL_7B, said)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "qwen3moe", "mistral3", "granite", "smollm3"])
def test_a_window_that_the_family_has_not_in_gguf_is_refused(architecture: str, tmp_path: Path) -> None:
    """Guards a window passed over in silence: of these families' files it is not known which layers would have it."""
    with pytest.raises(ModelError, match=rf"metadata {architecture}.attention.sliding_window 8 is not known of"):
        options(tmp_path, architecture, MISTRAL_7B, {"attention.sliding_window": 8})


def test_a_cap_of_0_is_none(tmp_path: Path) -> None:
    """Guards files whose writer says that way that nothing is capped."""
    said: dict[str, Number] = {"attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0}
    found = options(tmp_path, "gemma2", MISTRAL_7B, said)
    assert (found["attention_softcap"], found["final_softcap"]) == (0.0, 0.0)


PASSED_OVER: list[tuple[str, str, Number]] = [
    ("llama", "logit_scale", 16.0),
    ("qwen2", "attention.scale", 0.5),
    ("qwen3", "final_logit_softcapping", 30.0),
    ("gemma3", "attn_logit_softcapping", 50.0),
    ("granite", "attn_logit_softcapping", 50.0),
    ("gemma2", "embedding_scale", 12.0),
    ("llama", "attention.clamp_kqv", 8.0),
    ("smollm3", "use_parallel_residual", 1),
    ("llama", "attention.sliding_window_pattern", 6),
    ("qwen3", "rope.freq_base_swa", 200.0),
    ("gemma3", "attention.key_length_swa", 64),
    ("phi3", "rope.scaling.attn_factor", 1.25),
    ("qwen3moe", "expert_gating_func", 2),
    ("gpt-oss", "expert_gating_func", 1),
    ("qwen3moe", "expert_group_count", 8),
    ("qwen3moe", "expert_weights_scale", 2.5),
    ("gpt-oss", "swiglu_clamp_exp", 10.0),
]


@pytest.mark.parametrize(("architecture", "key", "value"), PASSED_OVER)
def test_a_key_that_would_change_answers_and_is_not_obeyed_is_refused(
    architecture: str, key: str, value: Number, tmp_path: Path
) -> None:
    """Guards files of a family's name that are of another's kind: run as the family, they would be wrong in silence."""
    header: dict[str, Number] = {"attention.sliding_window": 0} if architecture != "llama" else {}
    name = key.replace(".", r"\.")
    with pytest.raises(ModelError, match=rf"model.gguf: metadata {architecture}\.{name} is .*, which is not known of"):
        options(tmp_path, architecture, MISTRAL_7B, header | {key: value})


def test_what_says_a_keys_usual_value_is_taken(tmp_path: Path) -> None:
    """Guards sound files, whose writers say that nothing is scaled, grouped or otherwise in local layers."""
    said: dict[str, Number] = {
        "logit_scale": 1.0, "embedding_scale": 0.0, "expert_group_count": 1, "expert_gating_func": 1,
        "attn_logit_softcapping": 0.0, "rope.freq_base": 5e5, "rope.freq_base_swa": 5e5, "rope.dimension_count": 128,
        "rope.dimension_count_swa": 128, "attention.key_length_swa": 128, "rope.scaling.factor": 1.0,
        "rope.scaling.attn_factor": 1.0, "attention.causal": 1,
    }  # fmt: skip
    (table,) = options(tmp_path, "qwen3moe", MISTRAL_7B, said)["ropes"]
    assert (table.theta, table.scaling, table.scale) == (5e5, None, 1.0)


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_kind_is_linear(key: str, tmp_path: Path) -> None:
    """Guards the files of 2023, which name no kind: passed over, their long contexts would be noise."""
    (table,) = options(tmp_path, "llama", MISTRAL_7B, {key: 4.0})["ropes"]
    assert table.scaling == LinearRope(factor=4.0)
    (table,) = options(tmp_path, "llama", MISTRAL_7B, {key: 4.0, "rope.scaling.type": "none"})["ropes"]
    assert table.scaling is None


@pytest.mark.parametrize("tensor", [ROPE_FACTORS, LONG_FACTORS])
def test_a_scaling_beside_a_table_of_factors_is_refused(tensor: str, tmp_path: Path) -> None:
    """Guards a scaling passed over where a tensor has factors of its own."""
    header: dict[str, Number] = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    path = save(tmp_path, "llama", header, tensor)
    with pytest.raises(ModelError, match=rf"model.gguf: rope scaling 'linear' beside tensor {tensor} is not supp"):
        family_options(GGUFFile(path), "llama", MISTRAL_7B)
