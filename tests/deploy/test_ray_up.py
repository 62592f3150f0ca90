"""`ray up deploy/ray/local.yaml` for real: three hosts behind sshd, which are namespaces of this machine."""

import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from access.keys import make_key
from access.tenants import CredentialTable, Tenant
from tests.access.certificates import make_authority, make_certificate
from tests.access.test_authenticator import write
from tests.deploy.hosts import REPOSITORY, Host, Lan, lacking, lan, run, until

pytestmark = [
    pytest.mark.rayup,
    pytest.mark.skipif(lacking() != "", reason=f"no hosts to try it on: {lacking()}"),
]

ADDRESSES = {"head": "10.0.0.1", "prefill": "10.0.0.11", "decode": "10.0.0.12"}
"""The addresses in deploy/ray/local.yaml."""
ACTORS = {"head": "Router", "prefill": "Prefill", "decode": "Decode"}
ACCESS = "deploy/ray/access"
PAGE = REPOSITORY / "docs/deploy.md"
SHIPPED = "deploy/ray/local.yaml"
QUESTION = (
    "Please tell me in one short sentence what you know about {}, and why people care for it."
)
LONG = " ".join(f"Item {number} is a wheel that turns in the stream." for number in range(40))

NODES = """
import json, ray
ray.init(address="auto", logging_level=40)
nodes = {n["NodeManagerAddress"]: n["Labels"].get("pool", "") for n in ray.nodes() if n["Alive"]}
print("nodes", json.dumps(nodes))
"""
ASK = """
import pathlib, ssl, sys, urllib.request
body, home = sys.argv[1].encode(), pathlib.Path.home()
key, trusted = (home / "acme.key").read_text(), ssl.create_default_context(cafile=home / "ca.pem")
url, headers = "https://10.0.0.1:8000/v1/chat/completions", {"content-type": "application/json"}
request = urllib.request.Request(url, body, headers | {"authorization": f"Bearer {key.strip()}"})
print(urllib.request.urlopen(request, timeout=60, context=trusted).read().decode())
"""


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Lan]:
    """Three hosts that know nothing of Ray yet, and a laptop that may log in to them."""
    key = tmp_path / "key"
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    with lan(tmp_path) as network:
        for name, address in ADDRESSES.items():
            network.add(name, address, key.with_suffix(".pub").read_text())
        laptop = network.add("laptop", "10.0.0.2")
        (laptop.home / ".ssh").mkdir(mode=0o700)
        shutil.copy(key, laptop.home / ".ssh/id_ed25519")
        (laptop.home / ".ssh/config").write_text("StrictHostKeyChecking no\nBatchMode yes\n")
        (laptop.home / "local.yaml").write_text(edited())
        make_access(laptop.home)
        for host in network.hosts.values():
            host.boot()
        yield network


def documented() -> list[str]:
    """The four blocks of commands that the page has for machines of your own, for who logs in as root here."""
    section = PAGE.read_text().split("## On machines of your own")[1].split("\n## ")[0]
    blocks: list[str] = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 4
    return [block.replace(SHIPPED, "~/local.yaml").replace("ubuntu@", "root@") for block in blocks]


def edited() -> str:
    """The shipped file, edited: the hosts here have the addresses of the example, and another user."""
    text = (REPOSITORY / SHIPPED).read_text()
    assert text.count("ssh_user: ubuntu") == text.count(ACCESS) == 1
    return text.replace("ssh_user: ubuntu", "ssh_user: root").replace(ACCESS, "~/access")


def make_access(home: Path) -> None:
    """What the shipped configuration asks for: one key of a tenant and a certificate, and the client's side of both."""
    folder = home / "access"
    folder.mkdir()
    authority = make_authority(home)
    make_certificate(folder, authority, "headrace", file="server", san="DNS:headrace,IP:10.0.0.1")
    key, kept = make_key("acme", "tenant", "")
    write(folder / "keys.json", CredentialTable(tenants={"acme": Tenant()}, keys=[kept]))
    (home / "acme.key").write_text(key)


def nodes(head: Host) -> dict[str, str]:
    """Pool label by address of every live node; none while Ray does not answer."""
    try:
        out = head.run("python", "-c", NODES)
    except RuntimeError:
        return {}
    line = next(line for line in out.splitlines() if line.startswith("nodes "))
    return dict(json.loads(line.removeprefix("nodes ")))


def actors(network: Lan) -> dict[str, list[str]]:
    """Which of our actors run on which host, as its processes' titles say."""
    return {
        name: [
            kind
            for title in network.hosts[name].processes().values()
            for kind in ("Router", "Prefill", "Decode")
            if title.startswith(f"ray::{kind}Actor")
        ]
        for name in ACTORS
    }


def ask(laptop: Host, question: str) -> dict[str, Any]:
    """Whole reply of the HTTP front on the head."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 8,
        "temperature": 0.0,
    }
    return dict(json.loads(laptop.run("python", "-c", ASK, json.dumps(body), timeout_s=90.0)))


def text(reply: dict[str, Any]) -> str:
    return str(reply["choices"][0]["message"]["content"])


def moved(reply: dict[str, Any]) -> bool:
    return bool(reply["headrace"]["migration"]["blocks"])


def processor_s(host: Host, kind: str) -> float:
    """Processor seconds that a worker of ours has used so far on a host."""
    (pid,) = (p for p, t in host.processes().items() if t.startswith(f"ray::{kind}Actor"))
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def received_bytes(network: Lan, name: str) -> int:
    """What the host's cable has carried to it."""
    links = json.loads(run("ip", "-n", network.namespace(name), "-s", "-j", "link", "show", "eth0"))
    return int(links[0]["stats64"]["rx"]["bytes"])


@contextmanager
def serving(network: Lan, command: str, stop: str) -> Iterator["subprocess.Popen[bytes]"]:
    """`headrace up` on the head, started and at last ended as a user on the laptop does."""
    laptop = network.hosts["laptop"]
    log = network.folder / "up.log"
    with log.open("wb") as output:
        up = subprocess.Popen(
            laptop.command("bash", "-ec", command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        until(lambda: b"Try, in another" in log.read_bytes() or up.poll() is not None, 120.0, "up")
        yield up
    except BaseException:
        print(log.read_text(errors="replace"))
        raise
    finally:
        down = laptop.run("bash", "-ec", stop, timeout_s=90.0)
        up.wait(60.0)
    assert "Stopped after" in down and "Killing" not in down, down
    assert b"stopping" in log.read_bytes() and b"headrace:" not in log.read_bytes()


def test_pools_on_their_hosts_a_host_lost_and_nothing_left(network: Lan) -> None:
    """Guards against a pool on the wrong host, addresses that only their own host can reach, a lost host that takes the
    service with it or that nobody makes good, and processes that outlive the shutdown."""
    laptop, head, prefill = (network.hosts[name] for name in ("laptop", "head", "prefill"))
    start, serve, stop, end = documented()
    laptop.run("bash", "-ec", start, timeout_s=120.0)
    expected = {"10.0.0.1": "", "10.0.0.11": "prefill", "10.0.0.12": "decode"}
    until(lambda: nodes(head) == expected, 90.0, f"the cluster is not {expected}")

    with serving(network, serve, stop):
        assert actors(network) == {name: [kind] for name, kind in ACTORS.items()}
        again = laptop.run("bash", "-ec", serve, timeout_s=60.0)
        assert "runs already, under process" in again, again
        assert actors(network) == {name: [kind] for name, kind in ACTORS.items()}
        before = received_bytes(network, "decode")
        assert_migrated(ask(laptop, QUESTION.format("a mill")), network, before)

        with ThreadPoolExecutor(1) as pool:
            idle_s = processor_s(prefill, "Prefill")
            asked = pool.submit(ask, laptop, LONG)
            until(
                lambda: processor_s(prefill, "Prefill") > idle_s + 0.3,
                20.0,
                "no prompt on the host",
            )
            prefill.cut_power()
            assert not asked.done(), "it was answered before the host was lost"
            disturbed = asked.result()
        assert disturbed["headrace"]["decode"]["worker"] == "decode-0"
        assert ask(laptop, QUESTION.format("a river"))["headrace"]["migration"]["blocks"] == 0

        prefill.boot()
        until(lambda: actors(network)["prefill"] == ["Prefill"], 150.0, "nobody replaced prefill-0")
        numbers = itertools.count()
        until(
            lambda: moved(ask(laptop, QUESTION.format(f"wheel {next(numbers)}"))),
            60.0,
            "nothing migrates from the new worker",
        )
        before = received_bytes(network, "decode")
        assert_migrated(ask(laptop, QUESTION.format("a dam")), network, before)
        assert text(ask(laptop, LONG)) == text(disturbed), "the lost host has changed an answer"
    assert not any(actors(network).values())

    laptop.run("bash", "-ec", end, timeout_s=120.0)
    for name in ADDRESSES:
        host = network.hosts[name]
        until(lambda host=host: not host.processes(), 20.0, f"{name}: {host.processes()}")


def assert_migrated(reply: dict[str, Any], network: Lan, before: int) -> None:
    """The blocks went from host to host over tcp: the receiver's cable has carried at least as much."""
    migration = reply["headrace"]["migration"]
    assert reply["usage"]["completion_tokens"] == 8
    assert reply["headrace"]["prefill"]["worker"] == "prefill-0"
    assert reply["headrace"]["decode"]["worker"] == "decode-0"
    assert migration["transport"] == "tcp" and migration["bytes"] > 100_000
    assert received_bytes(network, "decode") - before >= migration["bytes"]
