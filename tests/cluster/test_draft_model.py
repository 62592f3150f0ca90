"""The draft model as it is configured, prepared, planned for and looked at before a start."""

import json
from pathlib import Path

import msgspec
import pytest

from cluster.cli import __main__ as cli
from cluster.config import ClusterConfig, ConfigError, with_model_dir
from cluster.doctor.host import examine
from cluster.processes.hosting import moved
from cluster.processes.prepare import draft_source, model_source, prepare_draft, prepare_model, specs
from engine.config import EngineConfig
from engine.device import EngineDevice, open_device
from engine.draft_model import ModelDrafter
from engine.drafts import EachAlone
from engine.model.config import ModelError
from tests.cluster.test_config import resolved
from tests.engine.model.checkpoints import VOCAB, build, save_hf, save_tokenizer
from worker.config import DecodeConfig, PrefillConfig


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model, a smaller one, and one that has fewer tokens."""
    folder = tmp_path_factory.mktemp("models")
    sizes = {"big": {}, "small": {"num_hidden_layers": 1, "hidden_size": 32}, "other": {"num_hidden_layers": 1}}
    named = {name: save_hf(build("qwen2", **more), folder / name) for name, more in sizes.items()}
    save_tokenizer(folder / "other", VOCAB - 20)
    return named


def _config(models: dict[str, str], cache: Path, draft: str = "small", **engine: object) -> ClusterConfig:
    own = EngineConfig(speculation="model", draft_model=models.get(draft, draft), **engine)  # type: ignore[arg-type]
    return ClusterConfig(
        model=models["big"], cache_dir=str(cache), prefill=PrefillConfig(engine=own), decode=DecodeConfig(engine=own)
    )


def _opened(config: ClusterConfig) -> EngineDevice:
    folder = prepare_model(config)
    return open_device(with_model_dir(config.decode.engine, folder, prepare_draft(config, folder)))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("engine.speculation=model",), "(flag --set) is 'model', but engine.draft_model names none"),
        (("engine.draft_model=x.gguf",), "is 'auto', but engine.draft_model is set, which only 'model' uses"),
        (
            ("engine.speculation=model", "engine.draft_model=x.gguf", "decode.engine.device=cuda"),
            "computes on the CPU, not on cuda with Triton's kernels",
        ),
        (
            ("engine.speculation=model", "engine.draft_model=x.gguf", "engine.attention=triton"),
            "computes on the CPU, not on cpu with Triton's kernels",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(flags: tuple[str, ...], told: str) -> None:
    """Guards a draft model that is named and silently not used."""
    with pytest.raises(ConfigError, match=r"decode\.engine\.speculation") as refused:
        resolved(*(f"--set={flag}" for flag in flags))
    assert told in str(refused.value)


def test_a_draft_model_that_cannot_be_used_is_refused_before_any_process_starts(
    models: dict[str, str], tmp_path: Path
) -> None:
    folder = prepare_model(_config(models, tmp_path))
    with pytest.raises(ConfigError, match=r"decode\.engine\.draft_model: .*nowhere\.gguf"):
        prepare_draft(_config(models, tmp_path, "/nowhere.gguf"), folder)
    with pytest.raises(ConfigError, match="other: another tokenizer than the model's: it has 300 tokens, the model"):
        prepare_draft(_config(models, tmp_path, "other"), folder)


def test_an_engine_refuses_what_a_launcher_would(models: dict[str, str], tmp_path: Path) -> None:
    """Guards a worker that is opened by another way than `headrace up`."""
    config = _config(models, tmp_path)
    folder = prepare_model(config)
    small = prepare_draft(config, folder)
    other = _config(models, tmp_path, "other")
    told = {
        "another tokenizer": with_model_dir(other.decode.engine, folder, _prepared_alone(other)),
        "engine.draft_pool_bytes: 64 bytes hold no block": msgspec.structs.replace(
            with_model_dir(config.decode.engine, folder, small), draft_pool_bytes=64
        ),
        "on cpu with triton kernels": msgspec.structs.replace(
            with_model_dir(config.decode.engine, folder, small), attention="triton"
        ),
    }
    for why, engine in told.items():
        with pytest.raises(ValueError, match=why):
            open_device(engine)
    with pytest.raises(ModelError):
        open_device(with_model_dir(config.decode.engine, folder, str(tmp_path / "gone")))


def _prepared_alone(config: ClusterConfig) -> str:
    own = msgspec.structs.replace(config, model=config.decode.engine.draft_model)
    return prepare_model(own)


def test_decode_workers_alone_have_it(models: dict[str, str], tmp_path: Path) -> None:
    """Guards a prefill worker that loads weights it never uses, and another host that has no draft model."""
    config = _config(models, tmp_path)
    folder = prepare_model(config)
    draft = prepare_draft(config, folder)
    prefill, decode, _ = specs(config, folder, source=model_source(config), draft_dir=draft)
    assert prefill.draft is None and decode.draft == draft_source(config)
    engines = [msgspec.convert(spec.config["engine"], EngineConfig) for spec in (prefill, decode)]
    assert [engine.draft_dir for engine in engines] == ["", draft] and draft
    there = msgspec.convert(moved(decode, "10.0.0.2").config["engine"], EngineConfig)
    assert (there.model_dir, there.draft_dir) == (folder, draft)
    device = open_device(engines[0])
    assert device.drafter is None and device.memory.draft_kv_bytes == 0
    device.kv.close()


@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_the_plan_counts_what_a_worker_takes(
    models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], attention: str
) -> None:
    """Guards a host that is filled by what no plan speaks of."""
    config = _config(models, tmp_path, draft_pool_bytes=1 << 20, attention=attention)
    device = _opened(config)
    assert isinstance(device.drafter, ModelDrafter) and device.draft_kv is not None
    flags = ["--set", "engine.speculation=model", "--set", f"engine.draft_model={models['small']}"]
    flags += ["--set", "engine.draft_pool_bytes=1048576", "--set", f"engine.attention={attention}"]
    assert cli.main(["plan", "--json", "--model", models["big"], *flags]) == 0
    prefill, decode = json.loads(capsys.readouterr().out)["pools"]
    assert decode["draft_weights_bytes"] == pytest.approx(device.memory.draft_weights_bytes, rel=0.05)
    assert decode["draft_kv_bytes"] == device.memory.draft_kv_bytes == device.draft_kv.nbytes > 1_000_000
    assert prefill["draft_weights_bytes"] == prefill["draft_kv_bytes"] == 0
    assert cli.main(["plan", "--model", models["big"], *flags]) == 0
    assert "draft model's KV" in capsys.readouterr().out
    device.kv.close()
    device.draft_kv.close()


def test_a_pool_by_the_memory_leaves_room_for_it() -> None:
    engine = EngineConfig(pool_bytes="auto", memory_bytes=10_000, reserve_bytes=1000)
    assert engine.kv_bytes(2000, 500) - engine.kv_bytes(2000, 500, draft_bytes=700) == 700


def test_other_drafters_need_no_second_model(models: dict[str, str], tmp_path: Path) -> None:
    config = _config(models, tmp_path)
    engine = msgspec.structs.replace(config.decode.engine, speculation="suffix", draft_model="")
    device = open_device(with_model_dir(engine, prepare_model(config)))
    assert isinstance(device.drafter, EachAlone) and device.draft_kv is None
    device.kv.close()


def test_doctor_reads_its_headers(models: dict[str, str], tmp_path: Path) -> None:
    """Guards a start that fails for a file that doctor had not looked at."""
    for draft, level in (("small", "ok"), ("/nowhere.gguf", "fail")):
        found = {check.name: check for check in examine(_config(models, tmp_path, draft), {})}
        assert found["draft model"].level == level and found["model"].level == "ok"
    assert "draft model" not in {check.name for check in examine(ClusterConfig(cache_dir=str(tmp_path)), {})}
