"""The cluster files of `deploy/ray`: what Ray's own validation, Ray's own command line and ours say of them."""

import argparse
import copy
import re
import shlex
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml

from cluster.processes.placement import gpus
from cluster.resolve import add_flags, resolve

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
FILES = ("local", "aws", "gcp")
CLOUDS = ("aws", "gcp")
MOUNTED = {"local": "headrace.toml", "aws": "headrace-gpu.toml", "gcp": "headrace-gpu.toml"}


def read(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / f"ray/{name}.yaml").read_text()))


def validated(config: dict[str, Any]) -> dict[str, Any]:
    """Validate the file as `ray up` does before it asks a cloud for anything."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared: dict[str, Any] = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    return prepared


def check_ray_start(command: str) -> dict[str, Any]:
    """What Ray's own parser makes of the `ray start` in a shell line. Raises what it raises for a wrong flag."""
    from ray.scripts.scripts import start

    words = shlex.split(command[command.index("ray start ") :])[2:]
    words = words[: words.index("&&")] if "&&" in words else words
    context: click.Context = start.make_context("start", words)
    return dict(context.params)


def resolved(file: Path) -> Any:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return resolve(parser.parse_args(["--config", str(file)]), {}).config


@pytest.mark.parametrize("name", FILES)
def test_ray_accepts_the_file(name: str) -> None:
    """Guards against a file that `ray up` turns down only when a user first runs it."""
    config = read(name)
    validated(config)
    for commands in ("head_start_ray_commands", "worker_start_ray_commands"):
        stop, start = config[commands]
        flags = check_ray_start(start)
        assert stop == "ray stop"
        assert flags["head"] == (commands == "head_start_ray_commands")
        assert flags["head"] or flags["address"] == "$RAY_HEAD_IP:6379"
        assert flags["object_store_memory"] >= 75 * 1024 * 1024, "Ray accepts no less"
    assert config["file_mounts"] == {
        "~/headrace.toml": f"deploy/ray/{MOUNTED[name]}",
        "~/headrace-access": "deploy/ray/access",
    }
    assert (DEPLOY / "ray" / MOUNTED[name]).is_file()


@pytest.mark.parametrize("name", FILES)
def test_a_user_edits_two_places(name: str) -> None:
    text = (DEPLOY / f"ray/{name}.yaml").read_text()
    assert re.findall(r"# EDIT (\d) of (\d)", text) == [("1", "2"), ("2", "2")]


def test_ray_refuses_a_slip() -> None:
    """Guards against checks above that would let anything pass."""
    config = read("aws")
    config["available_node_types"]["decode"]["lables"] = {"pool": "decode"}
    with pytest.raises(jsonschema.ValidationError, match="lables"):
        validated(config)
    with pytest.raises(click.NoSuchOption):
        check_ray_start("ulimit -n 9; ray start --adress=head:6379")


@pytest.mark.parametrize("name", CLOUDS)
def test_cloud_pools_are_told_apart_by_labels(name: str) -> None:
    """Guards against a pool whose workers find no node, and against a node that is taken away while it serves."""
    types = validated(read(name))["available_node_types"]
    assert {kind: one.get("labels", {}).get("pool") for kind, one in types.items()} == {
        "head": None,
        "prefill": "prefill",
        "decode": "decode",
    }
    assert types["head"]["resources"] == {"CPU": 0}
    assert all(types[pool]["min_workers"] >= 1 for pool in ("prefill", "decode"))


def gpus_of(name: str, node: dict[str, Any]) -> int:
    """GPUs of a machine, as its cloud's words have it."""
    if name == "gcp":
        return sum(one["acceleratorCount"] for one in node.get("guestAccelerators", []))
    return {"m7i.xlarge": 0, "g6e.2xlarge": 1}[node["InstanceType"]]


@pytest.mark.parametrize("name", CLOUDS)
def test_workers_that_compute_on_a_gpu_are_given_one(name: str) -> None:
    """Guards against GPUs that are rented and that Ray knows nothing of, against containers that do not see them, and
    against workers that wait for more than there are."""
    config = read(name)
    types = validated(config)["available_node_types"]
    ours = resolved(DEPLOY / "ray" / MOUNTED[name])
    for pool, engine in (("prefill", ours.prefill.engine), ("decode", ours.decode.engine)):
        asked = gpus(pool, engine, ours.ray)  # type: ignore[arg-type]
        told = types[pool]["resources"].get("GPU", 0)
        assert asked == told == gpus_of(name, types[pool]["node_config"]) == 1
    assert "GPU" not in types["head"]["resources"]
    assert gpus_of(name, types["head"]["node_config"]) == 0
    assert config["docker"]["worker_run_options"] == ["--gpus=all"]
    assert config["docker"]["image"].endswith(":cuda12")


def test_a_gpu_is_used_as_a_gpu() -> None:
    """Guards against a CPU's chunks, batches and blocks on a rented card, and against two workers' shares of one."""
    check_gpu_defaults(resolved(DEPLOY / "ray/headrace-gpu.toml"), device_share=1.0)


def check_gpu_defaults(config: Any, device_share: float) -> None:
    """The configuration says `cuda` and leaves the rest to the defaults."""
    assert 2048 <= config.prefill.chunk_tokens <= 8192 and config.decode.max_batch == 256
    assert config.start_timeout_s == 600
    for engine in (config.prefill.engine, config.decode.engine):
        assert (engine.dtype, engine.block_size, engine.pool_bytes) == ("auto", 64, "auto")
        assert engine.device_share == device_share


def test_eight_gpus_of_one_host_have_a_worker_each() -> None:
    """Guards workers that wait for a ninth GPU, or for a node of a pool, and GPUs that nobody uses."""
    config = resolved(DEPLOY / "ray/headrace-8gpu.toml")
    check_gpu_defaults(config, device_share=1.0)
    assert config.ray.address == "auto" and config.launcher == "ray" and config.ray.pool_label == ""
    each = {"prefill": config.prefill, "decode": config.decode}
    asked = {pool: gpus(pool, one.engine, config.ray) for pool, one in each.items()}  # type: ignore[arg-type]
    assert config.prefill_workers * asked["prefill"] + config.decode_workers * asked["decode"] == 8
    assert {one.engine.tensor_parallel for one in each.values()} == {1}


def test_eight_gpus_of_one_host_have_a_rank_each() -> None:
    """Guards a file that is refused at start, and ranks that wait for a ninth GPU or leave one idle."""
    config = resolved(DEPLOY / "ray/headrace-8gpu-ranks.toml")
    assert (config.prefill_workers, config.decode_workers) == (0, 1)
    assert config.ray.address == "auto" and config.launcher == "ray" and config.ray.pool_label == ""
    assert gpus("decode", config.decode.engine, config.ray) == config.decode.engine.tensor_parallel == 8
    plain = resolved(DEPLOY / "ray/headrace-8gpu.toml")
    assert config.decode.engine.pool_bytes == "auto" and config.decode.tiers == plain.decode.tiers
    assert config.decode.tiers.host_bytes > 0


def test_eight_gpus_of_each_of_two_hosts_have_a_worker_of_its_pool_each() -> None:
    """Guards workers that wait for a ninth GPU of their host, and pools that are heaped on one of the two."""
    config = resolved(DEPLOY / "ray/headrace-2x8gpu.toml")
    check_gpu_defaults(config, device_share=1.0)
    assert config.ray.address == "auto" and config.launcher == "ray" and config.ray.pool_label == "pool"
    for pool, number, one in (
        ("prefill", config.prefill_workers, config.prefill),
        ("decode", config.decode_workers, config.decode),
    ):
        assert number * gpus(pool, one.engine, config.ray) == 8  # type: ignore[arg-type]
        assert one.engine.tensor_parallel == 1
    check_starts_of_two_hosts("headrace-2x8gpu.toml")


def check_starts_of_two_hosts(name: str) -> None:
    text = (DEPLOY / "ray" / name).read_text()
    started = [check_ray_start(line) for line in text.splitlines() if line.startswith("# ray start ")]
    assert [flags["labels"] for flags in started] == ["pool=prefill", "pool=decode"]
    assert [flags["head"] for flags in started] == [True, False]


@pytest.mark.parametrize(("name", "hosts"), [("headrace-8gpu-2x4.toml", 1), ("headrace-2x8gpu-4x4.toml", 2)])
def test_four_gpus_are_a_worker_of_either_pool(name: str, hosts: int) -> None:
    """Guards files that are refused at start, ranks that wait for a ninth GPU of a host or leave one idle, and a pool
    on the other's host."""
    config = resolved(DEPLOY / "ray" / name)
    check_gpu_defaults(config, device_share=1.0)
    assert config.ray.address == "auto" and config.launcher == "ray"
    assert config.ray.pool_label == ("pool" if hosts == 2 else "")
    assert config.prefill_workers == config.decode_workers == hosts
    for pool, one in (("prefill", config.prefill), ("decode", config.decode)):
        assert gpus(pool, one.engine, config.ray) == one.engine.tensor_parallel == 4  # type: ignore[arg-type]
        assert one.tiers.host_bytes > 0
    if hosts == 2:
        check_starts_of_two_hosts(name)


def test_own_machines_and_laptops_compute_on_the_cpu() -> None:
    """Guards against a first try that fails for want of a GPU."""
    config = resolved(DEPLOY / "ray/headrace.toml")
    assert config.prefill.engine.device == config.decode.engine.device == "cpu"


def test_local_hosts_that_decode_are_hosts() -> None:
    """Guards against an example whose decode host is not in the list of hosts."""
    config = read("local")
    start = config["worker_start_ray_commands"][1]
    (named,) = re.findall(r'decode_hosts="([^"]*)"', start)
    hosts = config["provider"]["worker_ips"]
    assert set(named.split()) < set(hosts) and config["provider"]["head_ip"] not in hosts
    assert "RAY_enable_autoscaler_v2=0" in config["head_start_ray_commands"][1]


def test_the_shipped_configuration_is_ours() -> None:
    """Guards against a setting that `headrace up` does not know."""
    for name in set(MOUNTED.values()):
        config = resolved(DEPLOY / "ray" / name)
        assert config.ray.address == "auto" and config.launcher == "ray"
