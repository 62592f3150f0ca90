"""The doctor finds what it is made to find, and names the fix."""

import functools
import resource
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from access.config import AccessConfig
from access.internal import INTERNAL_NAME
from access.keys import make_key
from access.tenants import CredentialTable, Tenant
from cluster.config import ClusterConfig
from cluster.doctor import host as doctor
from cluster.doctor.access import access_checks
from cluster.doctor.check import Check
from cluster.doctor.environment import collect
from cluster.doctor.gpu import gpu_checks
from cluster.doctor.host import examine, print_checks
from cluster.doctor.models import configured_model
from cluster.resolve import Resolved, Setting
from cluster.rundir import ProcessIdentity, RunDir
from engine.config import EngineConfig, TierConfig
from engine.model.prepared.cache import prepare
from engine.model.prepared.loading import map_weights
from engine.model.prepared.panels import panel_weights
from router.config import RouterConfig
from tests.access.certificates import make_authority, make_certificate
from tests.access.test_authenticator import write
from tests.engine.model.checkpoints import build, save_hf
from tests.engine.model.quantized import Kind, write_model
from worker.config import PrefillConfig


def config(folder: Path, **more: object) -> ClusterConfig:
    given = {
        "run_dir": str(folder / "run"),
        "cache_dir": str(folder),
        "router": RouterConfig(grpc_port=0, http_port=-1),
    }
    return ClusterConfig(**{**given, **more})  # type: ignore[arg-type]


def found(config: ClusterConfig, **environ: str) -> dict[str, Check]:
    return {check.name: check for check in examine(config, environ)}


def test_this_host_is_fit(tmp_path: Path) -> None:
    checks = found(config(tmp_path))
    assert not [check for check in checks.values() if check.level == "fail"]
    assert {"memory", "memfd", "shared memory", "file limit", "wall clock", "ray", "gpu"} <= checks.keys()
    assert all(check.fix for check in checks.values() if check.level == "fail")


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("qwen2", "family qwen2, weights in bfloat16, 4 layers, context of 256 tokens"),
        ("mistral-window", "windows of 8"),
    ],
)
def test_model_is_named_by_family_and_format(case: str, says: str, tmp_path: Path) -> None:
    check = configured_model(save_hf(build(case).bfloat16(), tmp_path / "tiny"))
    assert check.level == "ok" and says in check.found, check


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"model_type": "qwen2"}, r"tiny: holds no *.safetensors file"),
        ({"model_type": "qwen2", "hidden_act": "relu"}, "relu"),
        ({"model_type": "deepseek_v3"}, "MLA"),
    ],
)
def test_model_that_does_not_run_is_refused(raw: dict[str, object], says: str, tmp_path: Path) -> None:
    """Guards a model that only the start would refuse, after minutes."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"), 64)
    counts = {"num_hidden_layers": 2, "num_attention_heads": 2}
    folder = tmp_path / "tiny"
    folder.mkdir()
    whole = {**sizes, **counts, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", **raw}
    (folder / "config.json").write_bytes(msgspec.json.encode(whole))
    check = configured_model(str(folder))
    assert check.level == "fail" and says in check.found, check


def test_demo_model_is_known_by_its_file() -> None:
    assert "family llama, weights in" in configured_model("").found


def test_model_that_is_not_there_is_said() -> None:
    assert configured_model("./nowhere.gguf").level == "fail"


def test_deep_reads_prepared_models(tmp_path: Path) -> None:
    """Guards a host that fails for its disk: without a look at the bytes, everything about it is fine."""
    mine = config(tmp_path)
    assert examine_deep(mine)["prepared models"].level == "ok"
    folder = prepare(write_model(tmp_path / "model.gguf", lambda name: Kind.Q4_K), tmp_path)
    weights = map_weights(folder)
    panel_weights(folder, weights)
    name = f"prepared model {folder.name[:8]}"
    check = examine_deep(mine)[name]
    assert check.level == "ok" and "every digest agrees" in check.found
    assert name not in found(mine), "it takes long"
    for path in (*folder.glob("panels-*.bin"), folder / "weights.bin"):
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
        check = examine_deep(mine)[name]
        assert check.level == "fail" and path.name in check.found and "holds other bytes" in check.found


def examine_deep(config: ClusterConfig) -> dict[str, Check]:
    return {check.name: check for check in examine(config, {}, deep=True)}


def test_a_taken_port_is_found_and_its_flag_named(tmp_path: Path, free_port: int) -> None:
    mine = config(tmp_path, router=RouterConfig(grpc_port=free_port, http_port=-1))
    assert found(mine)["router.grpc_port"].level == "ok"
    with socket.create_server(("127.0.0.1", free_port)):
        check = found(mine)["router.grpc_port"]
        assert check.level == "fail" and "--grpc-port 0" in check.fix
        with RunDir(mine, {}).hold():
            assert found(mine)["router.grpc_port"].level == "ok", "it is the running cluster's"


def test_an_address_of_another_host_is_found(tmp_path: Path) -> None:
    check = found(config(tmp_path, worker_host="203.0.113.7"))["worker_host"]
    assert check.level == "fail" and "worker_host" in check.fix


def test_pools_that_do_not_fit_are_found(tmp_path: Path) -> None:
    huge = PrefillConfig(engine=EngineConfig(pool_bytes=1 << 50))
    check = found(config(tmp_path, prefill=huge))["memory"]
    assert check.level == "fail" and "pool_bytes" in check.fix


def test_a_gpus_pool_is_not_the_hosts_memory(tmp_path: Path) -> None:
    """Guards a large card in a small host, and the tier beside it, which is locked in the host's memory at start."""
    huge = EngineConfig(device="cuda", pool_bytes=1 << 50)
    assert found(config(tmp_path, prefill=PrefillConfig(engine=huge)))["memory"].level == "ok"
    locked = PrefillConfig(engine=huge, tiers=TierConfig(host_bytes=1 << 50))
    check = found(config(tmp_path, prefill=locked))["memory"]
    assert check.level == "fail" and "tiers.host_bytes" in check.fix


@contextmanager
def file_limit(soft: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_few_files_are_found(tmp_path: Path) -> None:
    with file_limit(512):
        check = found(config(tmp_path))["file limit"]
    assert check.level == "fail" and check.fix.startswith("ulimit -n")
    with file_limit(2048):
        assert found(config(tmp_path))["file limit"].level == "warn"


def test_a_small_dev_shm_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the commonest container: 64 MiB of shared memory, in which Ray crawls."""
    usage = type("Usage", (), {"free": 64 << 20})()
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    check = found(config(tmp_path))["shared memory"]
    assert check.level == "warn" and "--shm-size" in check.fix and "64 MiB" in check.found


def test_a_strangers_folder_and_leftovers_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    assert found(config(tmp_path))["run_dir"].level == "fail"
    folder.chmod(0o700)
    assert found(config(tmp_path))["run_dir"].level == "ok"
    with subprocess.Popen(["sleep", "60"]) as left:
        one = ProcessIdentity.of("decode-0", left.pid)
        assert one is not None
        RunDir(config(tmp_path), {}).write([one])
        check = found(config(tmp_path))["run_dir"]
        left.kill()
    assert check.level == "warn" and check.fix == "headrace down" and "decode-0" in check.found


def test_rays_own_variables_are_found(tmp_path: Path) -> None:
    check = found(config(tmp_path), RAY_ADDRESS="10.0.0.1:6379")["ray variables"]
    assert check.level == "warn" and "RAY_ADDRESS" in check.found
    unused = found(config(tmp_path, launcher="process"), RAY_ADDRESS="x")
    assert "ray variables" not in unused and unused["ray"].level == "ok"


def test_an_old_ray_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "version", lambda _: "2.9.3")
    check = found(config(tmp_path))["ray"]
    assert check.level == "fail" and "ray>=2.50" in check.fix


def test_a_gpu_that_pytorch_cannot_use_is_found(tmp_path: Path) -> None:
    """Guards a GPU host with the CPU build, which would serve, and slowly, from the CPU."""
    assert [check.level for check in gpu_checks("", tmp_path / "none")] == ["ok"]
    (check,) = gpu_checks("decode.engine.device is cuda", tmp_path / "none")
    assert check.level == "fail" and check.found == "none, and decode.engine.device is cuda"
    import torch

    device = tmp_path / "nvidiactl"
    device.touch()
    if torch.cuda.is_available():
        pytest.skip("this host has a GPU that works")
    (check,) = gpu_checks("", device)
    assert check.level == "fail" and check.fix


def test_what_is_printed_names_the_fix() -> None:
    console = Console(file=StringIO(), width=60)
    print_checks([Check("a", "ok", "fine"), Check("b", "fail", "[x] broken", "mend [y]")], console)
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    assert [line.strip() for line in lines] == [
        "ok   a: fine",
        "fail b: [x] broken",
        "→ mend [y]",
        "2 checks: 1 failed, 0 warned",
    ]


def test_a_report_for_a_bug_keeps_secrets() -> None:
    settings = (
        Setting("router.namespace_key", "hush", "file x"),
        Setting("log_level", "debug", "flag --log-level"),
        Setting("name", "headrace", "default"),
    )
    environ = {"HEADRACE_ROUTER__NAMESPACE_KEY": "hush", "RAY_X": "1", "HOME": "/home/somebody"}
    told = collect(Resolved(ClusterConfig(), settings), environ)
    text = msgspec.json.encode(told).decode()
    assert "hush" not in text and "somebody" not in text
    assert told["variables"] == {"HEADRACE_ROUTER__NAMESPACE_KEY": "(set)", "RAY_X": "1"}
    assert list(told["settings that are not defaults"]) == ["router.namespace_key", "log_level"]
    assert told["packages"]["torch"][0].isdigit()


def test_an_allocator_without_handles_is_found(tmp_path: Path) -> None:
    """Guards against workers that load a model, and then cannot export its pool."""
    gpu = PrefillConfig(engine=EngineConfig(device="cuda"))
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}
    check = found(config(tmp_path, prefill=gpu), **environ)["gpu allocator"]
    assert check.level == "fail" and "expandable_segments" in check.found and "take it out" in check.fix
    assert "gpu allocator" not in found(config(tmp_path), **environ)
    assert "gpu allocator" not in found(config(tmp_path, prefill=gpu))


def test_what_is_said_of_keys_and_certificates(tmp_path: Path) -> None:
    """Guards a cluster that starts well, and that nobody gets into; and one whose certificate ends on a Sunday."""
    ca, keys = make_authority(tmp_path), tmp_path / "keys.json"
    certificate = functools.partial(make_certificate, tmp_path, ca)
    good, short, expired = (certificate(f"{days}", days=days, san="DNS:headrace") for days in (90, 3, -1))
    inner = certificate(INTERNAL_NAME, san=f"DNS:{INTERNAL_NAME}", days=90)
    _, key = make_key("acme", "tenant", "")
    write(keys, CredentialTable(tenants={"acme": Tenant()}, keys=[key]))

    def said(**more: str) -> dict[str, tuple[str, str]]:
        """By name of the check, its level and what was found."""
        checks = list(access_checks(config(tmp_path, access=AccessConfig(**more))))  # type: ignore[arg-type]
        assert all(bool(check.fix) == (check.level != "ok") for check in checks)
        return {check.name: (check.level, check.found) for check in checks}

    assert said() == {}
    whole = {"cert_file": good.cert, "key_file": good.key, "keys_file": str(keys)}
    internal = {"internal_cert_file": inner.cert, "internal_key_file": inner.key, "internal_ca_file": ca.cert}
    assert said(**whole, **internal, internal_clear_kv=True) == {  # type: ignore[arg-type]
        "keys": ("ok", f"{keys}: 1 keys, 0 certificates, 1 tenants"),
        "certificates": ("ok", f"{good.cert}: good for 90 days"),
        "internal certificates": ("ok", f"{inner.cert}: good for 90 days"),
    }
    for pair, level, told in ((short, "warn", "expires on "), (expired, "fail", "expired on ")):
        ((_, found),) = said(cert_file=pair.cert, key_file=pair.key).items()
        assert found[0] == level and told in found[1], found
    for broken, name, told in (
        (whole | {"key_file": short.key}, "certificates", "access.cert_file, access.key_file: "),
        (whole | {"keys_file": str(tmp_path / "none")}, "keys", "access.keys_file: "),
        (internal | {"internal_cert_file": good.cert}, "access", "may send KV blocks"),
        ({"cert_file": good.cert}, "access", "go together"),
    ):
        level, found = said(**broken)[name]
        assert level == "fail" and told in found
    outside = config(tmp_path, router=RouterConfig(host="0.0.0.0"))
    assert ["serve everybody" in check.found for check in access_checks(outside)] == [True]
    assert "access" in {check.name for check in examine(outside, {})}
