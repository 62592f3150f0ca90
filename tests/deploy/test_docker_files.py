"""`deploy/docker`: the linter's and the schema's word, and that what the files name is there."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.cli.__main__ import main
from tests.deploy.test_ray_files import DEPLOY

BIN = Path(sys.prefix) / "bin"
DOCKERFILE = DEPLOY / "docker/Dockerfile"
COMPOSE = DEPLOY / "docker/compose.yaml"
ON_A_GPU = DEPLOY / "docker/compose.gpu.yaml"


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True)


def lint(file: Path) -> "subprocess.CompletedProcess[str]":
    return run(str(BIN / "hadolint"), "--no-color", str(file))


def check_compose(file: Path) -> "subprocess.CompletedProcess[str]":
    schema = ("--builtin-schema", "vendor.compose-spec")
    return run(str(BIN / "check-jsonschema"), *schema, str(file))


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load(COMPOSE.read_text()))


def test_the_linter_has_nothing_to_say(tmp_path: Path) -> None:
    done = lint(DOCKERFILE)
    assert done.returncode == 0 and not done.stdout, done.stdout
    wrong = tmp_path / "Dockerfile"
    wrong.write_text(DOCKERFILE.read_text().replace("WORKDIR /src", "WORKDIR src"))
    assert lint(wrong).returncode != 0, "the linter lets anything pass"


def test_an_image_for_each_kind_of_machine() -> None:
    """Guards against a target that installs another one's extras, or runs as root."""
    stages = re.split(r"^FROM ", DOCKERFILE.read_text(), flags=re.MULTILINE)[1:]
    built = {stage.splitlines()[0].split(" AS ")[1]: stage for stage in stages}
    for target, extra in (("cpu", "."), ("cuda12", '".[cuda12]"'), ("cuda13", '".[cuda13]"')):
        assert f'"${{TORCH_INDEX}}" {extra} ' in built[target]
        assert "USER 1000" in built[target]
        assert f"whl/{target.replace('cuda', 'cu')}" in built[target]


def test_compose_fits_its_schema(tmp_path: Path) -> None:
    for file in (COMPOSE, ON_A_GPU):
        done = check_compose(file)
        assert done.returncode == 0, done.stdout
    slip = tmp_path / "compose.gpu.yaml"
    slip.write_text(ON_A_GPU.read_text().replace("capabilities:", "capability:"))
    assert check_compose(slip).returncode != 0, "a device without capabilities passes"
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(COMPOSE.read_text().replace("network_mode:", "network_mod:"))
    assert check_compose(wrong).returncode != 0, "the schema lets anything pass"


def test_what_compose_names_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a mount of nothing, which Docker makes an empty folder of, and a command that is not ours."""
    services = compose()["services"]
    for service in services.values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (COMPOSE.parent / source).exists(), source
            else:
                assert source in compose()["volumes"]
    program, verb, *flags = services["headrace"]["command"]
    assert (program, verb) == ("headrace", "up")
    assert main(["dump-config", *flags]) == 0
    assert re.search(r'router\.host +"0\.0\.0\.0"', capsys.readouterr().out)
    for name in ("prometheus", "grafana"):
        assert services[name]["network_mode"] == "service:headrace"
    published = " ".join(services["headrace"]["ports"])
    assert all(f"127.0.0.1:{port}:{port}" in published for port in (8000, 50051, 3000))


def test_the_gpu_is_asked_for_where_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a container without a GPU whose workers want one, and against one that a laptop must have."""
    services = yaml.safe_load(ON_A_GPU.read_text())["services"]
    assert set(services) == {"headrace"} <= set(compose()["services"]), "it only adds to the other"
    (device,) = services["headrace"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    target = services["headrace"]["build"]["target"]
    assert services["headrace"]["image"] == f"headrace:{target}"
    assert f" AS {target}\n" in DOCKERFILE.read_text()
    _, _, *flags = services["headrace"]["command"]
    assert main(["dump-config", *flags]) == 0
    shown = capsys.readouterr().out
    for pool in ("prefill", "decode"):
        assert re.search(rf'{pool}\.engine\.device +"cuda"', shown)
        assert re.search(rf"{pool}\.engine\.device_share +0\.5", shown), "both are on one card"
    assert re.search(r"decode\.max_batch +256 +# default for cuda", shown)
    assert "deploy" not in compose()["services"]["headrace"]
