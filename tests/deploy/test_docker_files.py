"""`deploy/docker`: the linter's and the schema's word, and that what the files name is there."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
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
    for target, cuda, extra in (("cpu", "none", "."), ("cuda12", "12", '".[cuda12]"'), ("cuda13", "13", '".[cuda13]"')):
        assert f'install-headrace "${{TORCH_INDEX}}" {cuda} {extra}' in built[target]
        assert "USER 1000" in built[target]
        assert f"whl/{target.replace('cuda', 'cu')}" in built[target]


@pytest.fixture
def installed(tmp_path: Path) -> Callable[..., tuple[int, str, list[str]]]:
    """Runs the installer with a `pip` that notes what it is told, and a PyTorch that says what CUDA it is for."""

    def go(cuda: str | None, wanted: str, has_index: bool = True) -> tuple[int, str, list[str]]:
        tools = tmp_path / "tools"
        (tools / "fake").mkdir(parents=True, exist_ok=True)
        refusal = "" if has_index else 'case "$*" in *--index-url*) exit 1;; esac'
        (tools / "pip").write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/pip\n{refusal}\n')
        (tools / "python").write_text(f'#!/bin/sh\nPYTHONPATH={tools}/fake exec {sys.executable} -B "$@"\n')
        for tool in ("pip", "python"):
            (tools / tool).chmod(0o755)
        torch = f"class version:\n    cuda = {cuda!r}\n__version__ = '1.2'\n"
        (tools / "fake/torch.py").write_text(torch)
        done = subprocess.run(
            ["sh", str(DEPLOY / "docker/install.sh"), "https://index.example", wanted, "."],
            cwd=DEPLOY.parent,
            env={"PATH": f"{tools}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stderr, (tmp_path / "pip").read_text().splitlines()

    return go


def test_another_pytorch_fails_the_build(installed: Callable[..., tuple[int, str, list[str]]]) -> None:
    """Guards an image without a GPU that has 3 GB for one, and one for a GPU whose PyTorch is for another CUDA."""
    (pin,) = re.findall(r"(?m)^torch==.*$", (DEPLOY.parent / "constraints.txt").read_text())
    for cuda, wanted in ((None, "none"), ("12.6", "12"), ("13.0", "13")):
        status, said, _ = installed(cuda, wanted)
        assert status == 0, said
    for cuda, wanted in (("12.8", "none"), ("13.0", "12"), (None, "13")):
        status, said, calls = installed(cuda, wanted)
        assert status != 0 and "is built for CUDA" in said
    assert calls[-3] == f"install --no-deps --index-url https://index.example {pin}", "from there and nowhere else"
    status, _, calls = installed(None, "none", has_index=False)
    assert status != 0 and "--index-url" in calls[-1], "it went on without the index"


def test_services_start_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a machine that comes back without its services, and against services whose network is gone when
    the one that had it has started again."""
    services = compose()["services"]
    assert {service["restart"] for service in services.values()} == {"unless-stopped"}
    network = services.pop("network")
    assert set(network) == {"image", "restart", "ports"}, "it holds the network and nothing that fails"
    for service in services.values():
        assert service["network_mode"] == "service:network"
        assert service["cap_drop"] == ["ALL"]
    assert services["headrace"]["shm_size"] == "1gb"


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
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (COMPOSE.parent / source).exists(), source
            else:
                assert source in compose()["volumes"]
    program, verb, *flags = services["headrace"]["command"]
    assert (program, verb) == ("headrace", "up")
    assert main(["dump-config", *flags]) == 0
    assert re.search(r'router\.host +"0\.0\.0\.0"', capsys.readouterr().out)
    published = " ".join(services["network"]["ports"])
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
