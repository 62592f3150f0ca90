"""Hosts that are namespaces of this machine: each has its own network, processes, mounts, name, home and /tmp.

A bridge in one more network namespace joins them; nothing of it is reached from outside, and no host has a default
route. A host's first process is a shell that runs sshd: killing it kills all of the host, as a power cut does.
"""

import os
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = ("ip", "unshare", "nsenter", "mount", "sshd", "ssh", "ssh-keygen", "rsync")
HOME = pwd.getpwuid(0).pw_dir
COVERED = (HOME, "/run", "/dev/shm", "/tmp")
"""Folders that every host has to itself; /tmp is covered last, since a test's folders may lie in it."""


def lacking() -> str:
    """Return why no such host can be made here, or nothing."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian: openssh-server, rsync, iproute2, util-linux)"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "--mount-proc", "true"],
        capture_output=True,
        text=True,
    )
    return f"may not make namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def run(*command: str, timeout_s: float = 20.0) -> str:
    """Run a command; returns its standard output. Raises RuntimeError with what it said where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


class Host:
    """One host, from `boot` to `cut_power`, as often as you like; its files outlive a power cut, but not the test."""

    def __init__(self, lan: "Lan", name: str, address: str, public_key: str) -> None:
        """`public_key`: who may log in as root; empty: nobody."""
        self.lan = lan
        self.name = name
        self.address = address
        self.folder = lan.folder / name
        self._process: subprocess.Popen[bytes] | None = None
        for covered in COVERED:
            (self.folder / covered.strip("/")).mkdir(parents=True)
        (self.folder / "tmp").chmod(0o1777)
        self._first = self._sshd(public_key) if public_key else "sleep infinity & wait"
        self.home = self.folder / HOME.strip("/")
        self.home.chmod(0o700)
        (self.home / ".bashrc").write_text(
            f"export PATH={sys.prefix}/bin:$PATH PYTHONPATH={REPOSITORY} LC_ALL=C.UTF-8\n"
        )

    def boot(self) -> None:
        """Plug it in and start its first process. Returns when its namespaces are there."""
        self.lan.plug(self)
        with (self.folder / "console").open("ab") as console:
            self._process = subprocess.Popen(
                [
                    *("nsenter", f"--net=/run/netns/{self.lan.namespace(self.name)}"),
                    *("unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child"),
                    *("--mount-proc", "bash", "-c", self._script()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
            )
        until(lambda: (self.folder / "up").exists(), 10.0, f"{self.name} does not boot")
        (self.folder / "up").unlink()

    def cut_power(self) -> None:
        """Every process of it is killed at once, and its cable is pulled first: nobody hears a goodbye."""
        process, self._process = self._process, None
        if process is None:
            return
        inside = processes(self._first_pid(process))
        self.lan.unplug(self)
        # Its first process dies with it, and with that one all others.
        process.kill()
        process.wait(10.0)
        # What the cut was for: nothing of it may run on.
        until(lambda: not alive(inside), 10.0, f"{self.name}: runs on without power")

    def command(self, *command: str) -> list[str]:
        """The command line that runs this command inside, from outside."""
        assert self._process is not None, f"{self.name} has no power"
        first = str(self._first_pid(self._process))
        # As after a login: nothing of the caller's environment comes in, neither its home nor its cache.
        login = ["env", "-i", f"HOME={HOME}", "USER=root", "LOGNAME=root", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"]
        inside = ["bash", "-c", f'. ~/.bashrc; cd {REPOSITORY}; exec "$@"', "bash", *command]
        return ["nsenter", "-t", first, "--mount", "--net", "--pid", "--uts", *login, *inside]

    def run(self, *command: str, timeout_s: float = 60.0) -> str:
        """Run it inside; returns its standard output. Raises RuntimeError where it fails."""
        return run(*self.command(*command), timeout_s=timeout_s)

    def processes(self) -> dict[int, str]:
        """What runs inside but for the first process and what it started itself, by its pid outside."""
        assert self._process is not None
        first = self._first_pid(self._process)
        return {p: c for p, c in processes(first).items() if p != first and "sshd" not in c}

    def _first_pid(self, process: "subprocess.Popen[bytes]") -> int:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return int(children[0])

    def _sshd(self, public_key: str) -> str:
        folder = self.folder / "sshd"
        folder.mkdir()
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{folder}/host_key")
        (folder / "keys").write_text(public_key)
        (folder / "config").write_text(
            f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/keys\nPermitRootLogin yes\n"
            "StrictModes no\nUsePAM no\nPasswordAuthentication no\nMaxStartups 100\n"
        )
        return f"/usr/sbin/sshd -D -e -f {folder}/config & wait"

    def _script(self) -> str:
        """Mounts first, from the stages in our folder, then the first process."""
        lines = ["set -e", f"hostname {self.name}", "ip link set lo up"]
        needed = {str(REPOSITORY), sys.prefix, sys.base_prefix, str(self.folder)}
        for covered in COVERED:
            stage = self.folder / covered.strip("/")
            for path in sorted(needed):
                if Path(path).is_relative_to(covered):
                    place = stage / Path(path).relative_to(covered)
                    lines += [f"mkdir -p {place}", f"mount --bind {path} {place}"]
        lines += [f"mount --rbind {self.folder}/{c.strip('/')} {c}" for c in COVERED]
        lines += [
            "mount -t tmpfs -o size=2g shm /dev/shm",
            "mkdir -p /run/sshd",
            f"mount --bind {self.folder}/hosts /etc/hosts",
            f"touch {self.folder}/up",
            self._first,
        ]
        names = [f"{host.address} {host.name}" for host in self.lan.hosts.values()]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        return "\n".join(lines)


class Lan:
    """The hosts and the bridge between them. Network namespaces are named `hrPID-NAME`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts: dict[str, Host] = {}
        run("ip", "netns", "add", self.namespace("lan"))
        self._ip("lan", "link", "add", "br0", "type", "bridge")
        self._ip("lan", "link", "set", "br0", "up")

    def namespace(self, name: str) -> str:
        return f"hr{os.getpid()}-{name}"

    def add(self, name: str, address: str, public_key: str = "") -> Host:
        run("ip", "netns", "add", self.namespace(name))
        self.hosts[name] = Host(self, name, address, public_key)
        return self.hosts[name]

    def plug(self, host: Host) -> None:
        """A new cable from the host to the bridge."""
        port, far = f"p-{host.name}", self.namespace(host.name)
        self._ip("lan", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", far)
        self._ip("lan", "link", "set", port, "master", "br0", "up")
        self._ip(host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
        self._ip(host.name, "link", "set", "eth0", "up")

    def unplug(self, host: Host) -> None:
        self._ip("lan", "link", "delete", f"p-{host.name}")

    def remove(self) -> None:
        """Cut every host's power and remove the namespaces."""
        for host in self.hosts.values():
            host.cut_power()
        for name in ("lan", *self.hosts):
            run("ip", "netns", "delete", self.namespace(name))

    def _ip(self, name: str, *words: str) -> None:
        run("ip", "-n", self.namespace(name), *words)


@contextmanager
def lan(folder: Path) -> Iterator[Lan]:
    """An empty network, gone at the end with all its hosts."""
    network = Lan(folder)
    try:
        yield network
    finally:
        network.remove()


def processes(first: int) -> dict[int, str]:
    """Every process in the pid namespace of `first`: command line by its pid outside."""
    namespace = os.readlink(f"/proc/{first}/ns/pid")
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.readlink(entry / "ns/pid") == namespace:
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(entry.name)] = command.strip() or (entry / "comm").read_text().strip()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


def alive(pids: dict[int, str]) -> list[int]:
    """Return the processes that have not ended; a zombie has."""
    left = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "ZX":
            left.append(pid)
    return left


def until(condition: Callable[[], object], within_s: float, complaint: str) -> None:
    """Wait for a condition. Raises AssertionError with the complaint when it takes too long."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{complaint} (waited {within_s:.0f} s)"
        time.sleep(0.1)
