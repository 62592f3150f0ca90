"""Workers behind networks that can swallow every packet: network namespaces, joined by pairs of virtual interfaces.

For a process of its own: `leave_the_network` takes it out of the machine's network, for good, so that nothing here can
meet the machine's addresses or routes, and the kernel takes all of it away with the process. Needs root, `ip` and `tc`.
"""

import ctypes
import json
import os
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from cluster.processes.process_launcher import ProcessLauncher
from cluster.processes.spec import Child, ChildReady, ChildSpec
from tests.chaos.proxy import ProxiedLauncher

CLONE_NEWNET = 0x40000000
HERE, HERE_DATA = "10.79.0.1", "10.79.0.2"
"""Addresses of workers that are not far away: for control streams, and for KV blocks."""
_libc = ctypes.CDLL(None, use_errno=True)


def _succeeds(status: int) -> None:
    if status:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def leave_the_network() -> None:
    """Give this process a network of its own, with a loopback only. To be called before any other thread is started.
    Raises OSError where that is not allowed."""
    _succeeds(_libc.unshare(CLONE_NEWNET))
    command("ip", "link", "set", "lo", "up")
    for address in (HERE, HERE_DATA):
        command("ip", "addr", "add", f"{address}/32", "dev", "lo")


def command(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def _in_a_thread(act: Callable[[], Any]) -> Any:
    """Run in a thread, whose namespace is its own and is inherited by its child processes."""
    box: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            box.append(act())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return box[0]


class Wire:
    """A pair of interfaces, one here and one far away, with an address each."""

    def __init__(self, place: "Place", name: str, network: str) -> None:
        self._place = place
        self._ends = (f"{name}-near", f"{name}-far")
        self.near, self.far = f"{network}.1", f"{network}.2"
        near, far = self._ends
        command(*f"ip link add {near} type veth peer name {far} netns {place.path}".split())
        for end, address, run in ((near, self.near, command), (far, self.far, place.command)):
            run("ip", "addr", "add", f"{address}/30", "dev", end)
            run("ip", "link", "set", end, "up")

    def swallow(self) -> None:
        """Drop every packet from now on, in both directions, without a word to anybody."""
        for end, run in self._both():
            run(*f"tc qdisc add dev {end} root pfifo limit 0".split())

    def heal(self) -> None:
        for end, run in self._both():
            run(*f"tc qdisc del dev {end} root".split())

    def dropped(self) -> list[int]:
        """Packets swallowed since `swallow`: those that left here, and those that left there."""
        found = []
        for end, run in self._both():
            (discipline,) = json.loads(run(*f"tc -s -j qdisc show dev {end}".split()))
            found.append(int(discipline["drops"]))
        return found

    def _both(self) -> list[tuple[str, Callable[..., str]]]:
        return [(self._ends[0], command), (self._ends[1], self._place.command)]


class Place:
    """A network namespace, reached over two wires: one for control streams, one for KV blocks."""

    def __init__(self, number: int) -> None:
        def make() -> int:
            _succeeds(_libc.unshare(CLONE_NEWNET))
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

        self._file = _in_a_thread(make)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.command("ip", "link", "set", "lo", "up")
        self.control = Wire(self, f"c{number}", f"10.77.{number}")
        self.data = Wire(self, f"d{number}", f"10.78.{number}")
        for target, wire in ((HERE, self.control), (HERE_DATA, self.data)):
            self.command("ip", "route", "add", target, "via", wire.near)

    def inside(self, act: Callable[[], Any]) -> Any:
        def there() -> Any:
            _succeeds(_libc.setns(self._file, CLONE_NEWNET))
            return act()

        return _in_a_thread(there)

    def command(self, *words: str) -> str:
        return str(self.inside(lambda: command(*words)))


class FarLauncher(ProxiedLauncher):
    """Starts the workers of one role far away, each in a place of its own; all others here. There are no proxies, whose
    own connections would see the network swallow."""

    def __init__(self, role: str, count: int) -> None:
        super().__init__(ProcessLauncher())
        self.places = {f"{role}-{number}": Place(number) for number in range(count)}

    def launch(self, spec: ChildSpec) -> Child:
        if spec.kind == "router":
            return super().launch(spec)
        place = self.places.get(spec.name)
        host, data_host = (place.control.far, place.data.far) if place else (HERE, HERE_DATA)
        config: dict[str, Any] = dict(spec.config)
        config["transfer"] = {**config["transfer"], "tcp_host": data_host}
        # Namespaces of this machine, which nobody else reaches.
        config["access"] = {**config["access"], "insecure": "open"}
        addressed = msgspec.structs.replace(spec, host=host, config=config)
        if place is None:
            return super().launch(addressed)
        started: Child = place.inside(lambda: ProxiedLauncher.launch(self, addressed))
        return started

    def reached(self, up: ChildReady) -> ChildReady:
        return up
