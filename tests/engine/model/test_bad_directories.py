"""Directories that are not what they should be: each is refused by a ModelError that names file and tensor or field
when a model is prepared, before any worker serves; whether its weights are converted or left where they lie."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE

from engine.model.config import ModelError
from engine.model.prepared.cache import prepare
from engine.model.prepared.loading import load_weights
from tests.engine.model.checkpoints import VOCAB, YARN, build, save_hf
from tests.engine.model.hf_quantized import compressed

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DOWN = "model.layers.0.mlp.down_proj.weight"
BIAS = "model.layers.0.self_attn.q_proj.bias"
NORM = "model.layers.1.self_attn.{}_norm.weight"
AT_FIRST_LOAD = ("NaN", "an infinite value")
"""Weights that are left where they lie are not read before."""
Change = Callable[[Path], object]


def said(**fields: Any) -> Change:
    """Put fields into config.json; without a value they are taken out."""

    def change(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text()) | fields
        (folder / "config.json").write_text(json.dumps({key: item for key, item in raw.items() if item is not None}))

    return change


def tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def change(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        edit(found)
        save_file(found, folder / WEIGHTS)

    return change


def header(edit: Callable[[bytes], bytes]) -> Change:
    def change(folder: Path) -> None:
        raw = (folder / WEIGHTS).read_bytes()
        end = 8 + struct.unpack("<Q", raw[:8])[0]
        new = edit(raw[8:end])
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(new)) + new + raw[end:])

    return change


def content(name: str, raw: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(raw)


def cut(name: str) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-40])


def linked(name: str, to: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(folder / to)

    return change


def in_place(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def piped(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def removed(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def indexed(edit: Callable[[dict[str, Any]], object]) -> Change:
    def change(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        edit(index)
        (folder / INDEX).write_text(json.dumps(index))

    return change


def save_tokens(folder: Path, count: int) -> None:
    Tokenizer(BPE(vocab={f"t{at}": at for at in range(count)}, merges=[])).save(str(folder / "tokenizer.json"))


def targets(of_group: Any) -> Change:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    return said(quantization_config=compressed("float-quantized", weights, targets=of_group))


TWICE = b'"' + DOWN.encode() + b'":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
MIXTURE = {
    "model_type": "qwen3_moe", "sliding_window": None, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
GRANITE = {"model_type": "granite", "sliding_window": None}
GEMMA2 = {"model_type": "gemma2"}
CLAMPED = {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
UNSOUND = rf"{WEIGHTS}: not a sound safetensors file"
CASES: dict[str, tuple[Change, str]] = {
    "zero bytes": (content(WEIGHTS, b""), UNSOUND),
    "a header of 2^60 bytes": (content(WEIGHTS, struct.pack("<Q", 1 << 60) + bytes(99)), UNSOUND),
    "cut": (cut(WEIGHTS), UNSOUND),
    "unknown dtype": (header(lambda raw: raw.replace(b'"F32"', b'"F99"', 1)), UNSOUND),
    "a name twice": (header(lambda raw: raw[:1] + TWICE + raw[1:]), rf"{WEIGHTS}: has \d+ tensors by \d+ names"),
    "one tensor in two files": (
        lambda folder: shutil.copy(folder / WEIGHTS, folder / "more.safetensors"),
        r"tensor .* is in model.safetensors too",
    ),
    "missing": (tensors(lambda found: found.pop(DOWN)), f"tensor {DOWN} is missing"),
    "shape": (
        tensors(lambda found: found.update({DOWN: found[DOWN][:-1].contiguous()})),
        rf"{WEIGHTS}: tensor {DOWN} has shape \(63, 96\), expe",
    ),
    "dtype": (tensors(lambda found: found.update({DOWN: found[DOWN].int()})), f"{DOWN}: dtype I32 is not supported"),
    "FP8 unsaid": (
        tensors(lambda found: found.update({DOWN: found[DOWN].to(torch.float8_e4m3fn)})),
        f"{DOWN}: dtype F8_E4M3",
    ),
    "a link to itself": (linked(WEIGHTS, WEIGHTS), "Symlink loop|Too many levels"),
    "a link to nothing": (linked(WEIGHTS, "nothing"), "No such file"),
    "a folder": (in_place(WEIGHTS), f"{WEIGHTS}: .*(Is a directory|cannot be read)"),
    "a pipe": (piped(WEIGHTS), f"{WEIGHTS}: cannot be read: it is not a file"),
    "a pipe beside": (piped("chat_template.jinja"), "chat_template.jinja: cannot be read: it is not a file"),
    "a device": (linked(WEIGHTS, "/dev/zero"), f"{WEIGHTS}: cannot be read: it is not a file"),
    "config is a pipe": (piped("config.json"), "config.json: cannot be read: it is not a file"),
    "tokenizer is a pipe": (piped("tokenizer.json"), "tokenizer.json: cannot be read: it is not a file"),
    "none": (removed(WEIGHTS), r"holds no \*.safetensors file"),
    "pickles": (lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"), "holds only pickled weights"),
    "no config": (removed("config.json"), "config.json: cannot be read"),
    "empty config": (content("config.json", b""), "config.json: not a JSON object"),
    "config of no text": (content("config.json", b"\xff\xfe"), "config.json: not a JSON object"),
    "nested config": (content("config.json", b'{"a":' * 100_000), "config.json: not a JSON object"),
    "config links to itself": (linked("config.json", "config.json"), "config.json: cannot be read"),
    "no hidden_size": (said(hidden_size=None), "config.json: hidden_size is missing"),
    "no rms_norm_eps": (said(rms_norm_eps=None), "config.json: rms_norm_eps is missing"),
    "no model_type": (said(model_type=None), "config.json: unknown model_type None"),
    "a size of words": (said(hidden_size="wide"), "config.json: a field is not of the kind"),
    "no heads": (said(num_attention_heads=0), "config.json: heads is 0"),
    "too many layers": (said(num_hidden_layers=10**9), "config.json: layers is 1000000000"),
    "activation": (said(hidden_act=["silu"]), r"activation \['silu'\] is not supported"),
    "layer_types": (said(layer_types=3), "layer_types is 3, not a list of names"),
    "nested layer_types": (said(layer_types=[["a"]]), "layer_types is .*, not a list of names"),
    "quantization of a word": (said(quantization_config="fp8"), "quantization_config is 'fp8', not a table"),
    "quantization of a list": (said(quantization_config=[1]), r"quantization_config is \[1\], not a table"),
    "unknown quantization": (said(quantization_config={"quant_method": "hqq"}), "quant_method 'hqq' is not supported"),
    "targets of a number": (targets(-1), "group_0.targets is -1, not a list of names"),
    "targets of numbers": (targets([1]), r"group_0.targets is \[1\], not a list of names"),
    "targets of no pattern": (targets(["re:("]), r"group_0.targets: 're:\(' is no pattern: missing \)"),
    "a division by nothing": (
        said(model_type="granite", sliding_window=None, logits_scaling=0),
        "config.json: a field is not of the kind that it should be: logits_scaling is 0, not a number above 0",
    ),
    "an infinite scale": (
        said(model_type="gemma2", query_pre_attn_scalar=0),
        "config.json: .*query_pre_attn_scalar is 0, not a number above 0",
    ),
    "a complex scale": (
        said(model_type="gemma2", query_pre_attn_scalar=-1),
        "config.json: .*query_pre_attn_scalar is -1, not a number above 0",
    ),
    "windows of a word": (
        said(model_type="qwen2", use_sliding_window="no", max_window_layers=0),
        "config.json: a field is not of the kind that it should be: use_sliding_window is 'no', not true or false",
    ),
    "tied by a word": (said(tie_word_embeddings="false"), "config.json: .*tie_word_embeddings is 'false', not true or"),
    "biases of a word": (said(attention_bias="no"), "config.json: .*attention_bias is 'no', not true or false"),
    "both ways in a word": (said(is_causal="no"), "config.json: .*is_causal is 'no', not true or false"),
    "experts in each layer of none": (said(**MIXTURE, decoder_sparse_step=0), "decoder_sparse_step is 0, must be at l"),
    "experts backwards": (said(**MIXTURE, decoder_sparse_step=-1), "config.json: .*decoder_sparse_step is -1, must be"),
    "experts by a half": (said(**MIXTURE, decoder_sparse_step=1.5), "decoder_sparse_step is 1.5, not a whole number"),
    "normalised by a word": (said(**MIXTURE, norm_topk_prob="no"), "norm_topk_prob is 'no', not true or false"),
    "a gate clamped below 0": (said(**CLAMPED, swiglu_limit=-7.0), "config.json: .*swiglu_limit is -7.0, not a"),
    "a gate clamped at 0": (said(**CLAMPED, swiglu_limit=0), "config.json: .*swiglu_limit is 0, not a number above 0"),
    "a gate of alpha below 0": (said(**CLAMPED, swiglu_alpha=-1.7), "config.json: .*swiglu_alpha is -1.7, not a numb"),
    "an embedding times 0": (said(**GRANITE, embedding_multiplier=0), "embedding_multiplier is 0, not a number above"),
    "branches taken away": (said(**GRANITE, residual_multiplier=-0.2), "residual_multiplier is -0.2, not a number ab"),
    "scores of no number": (said(**GRANITE, attention_multiplier="nan"), "attention_multiplier is 'nan', not a numb"),
    "scores of true": (said(**GRANITE, attention_multiplier=True), "attention_multiplier is True, not a number above"),
    "logits turned round": (said(**GRANITE, logits_scaling=-8.0), "config.json: .*logits_scaling is -8.0, not a num"),
    "scores capped below 0": (said(**GEMMA2, attn_logit_softcapping=-50.0), "attn_logit_softcapping is -50.0, not a n"),
    "scores capped at 0": (said(**GEMMA2, attn_logit_softcapping=0), "attn_logit_softcapping is 0, not a number abov"),
    "logits capped below 0": (said(**GEMMA2, final_logit_softcapping=-30), "final_logit_softcapping is -30, not a nu"),
    "logits capped by a word": (said(**GEMMA2, final_logit_softcapping="30"), "final_logit_softcapping is '30', n"),
    "a scale of no number": (said(**GEMMA2, query_pre_attn_scalar="nan"), "query_pre_attn_scalar is 'nan', not a num"),
    "a dense layer past the last": (said(**MIXTURE, mlp_only_layers=[0, 4]), r"mlp_only_layers is \[0, 4\], .* 0 to 3"),
    "a dense layer before the first": (said(**MIXTURE, mlp_only_layers=[-1]), r"mlp_only_layers is \[-1\], not a list"),
    "half a dense layer": (said(**MIXTURE, mlp_only_layers=[1.5]), r"mlp_only_layers is \[1.5\], not a list of layers"),
    "a dense layer of true": (said(**MIXTURE, mlp_only_layers=[True]), r"mlp_only_layers is \[True\], not a list of"),
    "windows from a layer before the first": (
        said(model_type="qwen2", use_sliding_window=True, max_window_layers=-1),
        "config.json: max_window_layers is -1, must be at least 0",
    ),
    "layers that rotate twice": (
        said(model_type="smollm3", sliding_window=None, no_rope_layers=[1, 2, 1, 0]),
        r"config.json: no_rope_layers is \[1, 2, 1, 0\], not a list of 0 and 1",
    ),
    "windows of layers that have none": (
        said(model_type="smollm3", layer_types=["full_attention", "sliding_attention"] * 2),
        r"config.json: layer_types \['full_attention', 'sliding_attention'\] without use_sliding_window are not supp",
    ),
    "recurrent layers by their types": (
        said(model_type="smollm3", sliding_window=None, layer_types=["linear_attention"] * 4),
        r"config.json: layer_types \['linear_attention'\] without use_sliding_window are not supported",
    ),
    "a temperature below 0": (
        said(model_type="ministral3", rope_parameters=YARN | {"llama_4_scaling_beta": -0.1}),
        "config.json: .*llama_4_scaling_beta is -0.1, not a number above 0",
    ),
    "half a token of the original context": (
        said(rope_parameters=YARN | {"original_max_position_embeddings": 32.5}),
        "config.json: .*original_max_position_embeddings is 32.5, not a whole number",
    ),
    "no KV heads": (said(num_key_value_heads=0), "config.json: kv_heads is 0, must be at least 1"),
    "heads of no size": (said(head_dim=0), "config.json: head_dim is 0, must be at least 1"),
    "global layers backwards": (
        said(model_type="gemma3_text", sliding_window_pattern=-6),
        "config.json: .*sliding_window_pattern is -6, must be at least 1",
    ),
    "a template of a number": (
        content("tokenizer_config.json", b'{"chat_template": 5}'),
        "tokenizer_config.json: chat_template is 5, not a text",
    ),
    "no tokenizer": (removed("tokenizer.json"), "tokenizer.json: cannot be read"),
    "no tokenizer in it": (content("tokenizer.json", b"{}"), "tokenizer.json: not a tokenizer"),
    "a bias without a place": (
        tensors(lambda found: found.update({BIAS: torch.ones(64)})),
        f"{WEIGHTS}: tensor {BIAS}: the family mistral has no place for it$",
    ),
    "a norm without a place": (
        tensors(lambda found: found.update({NORM.format(name): torch.ones(16) for name in "qk"})),
        r"tensor model.layers.1.self_attn.[qk]_norm.weight: .* no place for it, nor for 1 more$",
    ),
    "a layer more than config.json has": (said(num_hidden_layers=3), r"tensor model.layers.3.*no place .*, nor for 8"),
    "a tensor called data_offsets": (
        tensors(lambda found: found.update(data_offsets=torch.ones(1))),
        "tensor data_offsets: the family mistral has no place for it",
    ),
    "codes beside the weight": (
        tensors(lambda found: found.update({DOWN.replace("weight", "qweight"): torch.ones(3, 3, dtype=torch.int32)})),
        "down_proj.qweight: the family mistral has no place for it",
    ),
    "a scale that is not said": (
        tensors(lambda found: found.update({f"{DOWN}_scale": torch.ones(1)})),
        f"{DOWN}_scale: the family mistral has no place for it",
    ),
    "a head of its own, tied": (
        said(tie_word_embeddings=True),
        "tensor lm_head.weight is not the embedding, and tie_word_embeddings says it is",
    ),
    "NaN": (
        tensors(lambda found: found[DOWN].fill_(torch.nan)),
        f"{WEIGHTS}: tensor {DOWN}: a value is not a finite number",
    ),
    "an infinite value": (
        tensors(lambda found: found[DOWN].view(-1)[-1:].fill_(-torch.inf)),
        f"{DOWN}: a value is not a finite number",
    ),
    "attention both ways": (said(is_causal=False), "config.json: is_causal is false: only causal attention"),
    "layers without rotation in a word": (
        said(model_type="smollm3", sliding_window=None, no_rope_layers="1110"),
        "config.json: no_rope_layers is '1110', not a list of 0 and 1",
    ),
    "a window of true": (said(sliding_window=True), "config.json: sliding_window True is not a number of tokens"),
    "a size of true": (said(hidden_size=True), "hidden_size is True, not a whole number"),
    "a size and a half": (said(intermediate_size=96.5), "intermediate_size is 96.5, not a whole number"),
    "a context without end": (said(max_position_embeddings=1 << 40), "context_tokens is 1099511627776, must"),
    "rms_norm_eps of 0": (said(rms_norm_eps=0), "config.json: norm_eps is 0.0, must be above 0"),
    "rms_norm_eps of a list": (said(rms_norm_eps=[1e-5]), r"config.json: .*rms_norm_eps is \[1e-05\], not a number"),
    "a context times a list": (
        said(rope_parameters=YARN | {"factor": [4.0]}),
        r"config.json: .*factor is \[4.0\], not a number",
    ),
    "a rotary table of a list": (
        said(model_type="gemma3_text", sliding_window=8, rope_parameters={"full_attention": [1]}),
        r"config.json: rope_parameters.full_attention \[1\] is not a table",
    ),
    "scores capped in Gemma 3": (
        said(model_type="gemma3_text", sliding_window=8, attn_logit_softcapping=50.0),
        "config.json: attn_logit_softcapping 50.0 is not known of this family",
    ),
    "experts chosen by groups": (said(**MIXTURE, n_group=4), "config.json: n_group 4 is not known of this family"),
    "experts chosen by sigmoid": (said(**MIXTURE, scoring_func="sigmoid"), "json: scoring_func 'sigmoid' is not"),
    "experts scaled": (said(**MIXTURE, routed_scaling_factor=2.5), "json: routed_scaling_factor 2.5 is not known"),
    "clipped keys": (said(clip_qkv=8.0), "config.json: clip_qkv 8.0 is not known of this family"),
    "factors of another family": (said(logits_scaling=8.0), "config.json: logits_scaling 8.0 is not known of this fam"),
    "rms_norm_eps of no number": (said(rms_norm_eps="nan"), "config.json: norm_eps is nan, not a finite number"),
    "theta of 0": (said(rope_parameters={"rope_theta": 0.0}), "a rotary table has theta 0.0"),
    "theta without end": (said(rope_parameters={"rope_theta": "inf"}), "theta is inf, not a finite number"),
    "linear rope of 0": (
        said(rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 0}),
        "a rope scaling makes no frequencies: LinearRope",
    ),
    "yarn of a context of 0": (
        said(rope_parameters=YARN | {"original_max_position_embeddings": -1}),
        "a rope scaling makes no frequencies: YarnRope",
    ),
    "a tokenizer larger than the embedding": (
        lambda folder: save_tokens(folder, VOCAB + 1),
        f"tokenizer.json: has a token of id {VOCAB}, and the embedding {VOCAB} rows",
    ),
    "an end that is a word": (said(eos_token_id="</s>"), "config.json: eos_token_id '</s>' is not an id of 0 to 319"),
    "an end below 0": (said(eos_token_id=-1), "config.json: eos_token_id -1 is not an id of 0 to 319"),
    "an end of true": (said(eos_token_id=True), "config.json: eos_token_id True is not an id"),
    "an end past the embedding": (said(eos_token_id=[2, VOCAB]), f"config.json: eos_token_id {VOCAB} is not an id"),
    "an end in lists": (said(eos_token_id=[[2]]), r"config.json: eos_token_id \[2\] is not an id"),
    "another end past the embedding": (
        content("generation_config.json", b'{"eos_token_id": 320}'),
        "generation_config.json: eos_token_id 320 is not an id",
    ),
    "tokenizer_config": (content("tokenizer_config.json", b"[1]"), "tokenizer_config.json: not a JSON object"),
}
SHARDED: dict[str, tuple[Change, str]] = {
    "a shard is missing": (removed("model-00002-of-00016.safetensors"), "model-00002-of-00016.safetensors: .*No such"),
    "a shard is cut": (cut("model-00002-of-00016.safetensors"), "model-00002-of-00016.safetensors: not a sound"),
    "a shard of no bytes": (content("model-00002-of-00016.safetensors", b""), "model-00002-of-00016.*: not a sound"),
    "no map": (indexed(lambda index: index.pop("weight_map")), f"{INDEX}: weight_map is not a table"),
    "numbers in the map": (indexed(lambda index: index.update(weight_map={"a": 3})), f"{INDEX}: weight_map is not"),
    "a file elsewhere": (
        indexed(lambda index: index["weight_map"].update({DOWN: "../../x.safetensors"})),
        "No such file",
    ),
    "a file of no name": (
        indexed(lambda index: index["weight_map"].update({DOWN: "a\0.safetensors"})),
        f"{INDEX}: weight_map is not",
    ),
    "a tensor that is in no file": (
        indexed(lambda index: index["weight_map"].update({BIAS: "model-00002-of-00016.safetensors"})),
        f"{INDEX}: names tensor {BIAS} in model-00002-of-00016.safetensors, which does not have it",
    ),
    "a tensor that is in another file": (
        indexed(lambda index: index["weight_map"].update({DOWN: "model-00001-of-00016.safetensors"})),
        f"{INDEX}: names tensor {DOWN} in model-00001-of-00016.safetensors, which does not have it",
    ),
    "no text": (content(INDEX, b"\xff"), f"{INDEX}: not a JSON object"),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("sources")
    save_hf(build("mistral"), folder / "one")
    save_hf(build("mistral"), folder / "sharded", max_shard_size="60KB")
    for name in ("one", "sharded"):
        prepare(str(folder / name), folder / "cache")  # sound before it is changed
    return folder / "one", folder / "sharded"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("name", [*CASES, *SHARDED])
def test_is_refused_by_name(name: str, mapped: bool, sources: tuple[Path, Path], tmp_path: Path) -> None:
    """Guards a traceback, or a model that runs and is wrong, in place of a word about the file."""
    change, message = (CASES | SHARDED)[name]
    folder = tmp_path / "model"
    shutil.copytree(sources[name in SHARDED], folder)
    change(folder)
    with pytest.raises(ModelError, match=message) as caught:
        made = prepare(str(folder), tmp_path / "cache", mapped=mapped)
        assert name in AT_FIRST_LOAD and not mapped
        load_weights(made, torch.device("cpu"))
    assert str(folder) in str(caught.value) or "x.safetensors" in str(caught.value)


def also_in(other: str) -> Change:
    return lambda folder: shutil.copy(folder / WEIGHTS, folder / other)


def tied(folder: Path) -> None:
    tensors(lambda found: found.update({"lm_head.weight": found["model.embed_tokens.weight"].clone()}))(folder)
    said(tie_word_embeddings=True)(folder)


HARMLESS: dict[str, Change] = {
    "rotary tables": tensors(
        lambda found: found.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    ),
    "biases of zeros": tensors(lambda found: found.update({BIAS: torch.zeros(64)})),
    "scales of KV": tensors(lambda found: found.update({"model.layers.0.self_attn.k_scale": torch.ones(1)})),
    "a head that is the embedding": tied,
    "the publisher's own format": also_in("consolidated.safetensors"),
    "sizes with a point": said(hidden_size=64.0),
    "fields that change nothing": said(
        rope_interleaved=False, n_group=1, scoring_func="softmax", logits_scaling=1.0, residual_multiplier=1
    ),
}


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_no_answer_is_taken(name: str, mapped: bool, sources: tuple[Path, Path], tmp_path: Path) -> None:
    """Guards released directories from the refusal of what nothing reads."""
    folder = tmp_path / "model"
    shutil.copytree(sources[0], folder)
    HARMLESS[name](folder)
    load_weights(prepare(str(folder), tmp_path / "cache", mapped=mapped), torch.device("cpu"))
