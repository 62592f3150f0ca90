"""A TCP relay in front of a worker's gRPC port, so that a test can cut its streams or count what they carry.

Only control frames pass here; KV blocks take their own way (shm, tcp).
"""

import contextlib
import socket
import threading

import msgspec

from cluster.processes.spec import Child, ChildReady, ChildSpec, Launcher
from engine.messages import PeerAddress
from router.core.escalation import Verdict


class Proxy:
    """Relays connections to `target` (host:port). `address` is where it listens."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._lock = threading.Lock()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.bytes_in = 0
        """Bytes relayed towards the worker so far."""
        self.bytes_out = 0
        """Bytes relayed from the worker since its streams were last cut."""
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> int:
        """Close every connection, both ends; returns how many there were. New ones are let through."""
        with self._lock:
            pairs, self._pairs = self._pairs, set()
            self.bytes_out = 0
        for pair in pairs:
            for end in pair:
                _close(end)
        return len(pairs)

    def close(self) -> None:
        _close(self._listener)
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            pair = (client, server)
            for end in pair:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pairs.add(pair)
            for ends in (pair, pair[::-1]):
                threading.Thread(target=self._relay, args=(*ends, pair), daemon=True).start()

    def _relay(
        self,
        source: socket.socket,
        sink: socket.socket,
        pair: tuple[socket.socket, socket.socket],
    ) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
                if source is pair[0]:
                    self.bytes_in += len(data)
                else:
                    self.bytes_out += len(data)
        except OSError:
            pass  # either end is gone: the relay ends, as it does at the end of the stream
        for end in pair:
            _close(end)
        with self._lock:
            self._pairs.discard(pair)


def _close(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


class ProxiedLauncher:
    """Any launcher, whose workers are reached through proxies: the supervisor tells the router those addresses.

    `proxies` and `direct` (the worker's own address) are by worker name, of its latest process."""

    def __init__(self, inner: Launcher) -> None:
        self._inner = inner
        self.proxies: dict[str, Proxy] = {}
        self.direct: dict[str, ChildReady] = {}
        self.accused: list[Verdict] = []
        """What the router is made to say of workers, beside what it says itself."""

    def open(self) -> None:
        self._inner.open()

    def launch(self, spec: ChildSpec) -> Child:
        child = self._inner.launch(spec)
        return _ProxiedChild(child, self)

    def reached(self, up: ChildReady) -> ChildReady:
        """How others reach a new process of a worker."""
        old = self.proxies.get(up.name)
        proxy = self.proxies[up.name] = Proxy(up.address)
        if old is not None:
            old.close()
        return msgspec.structs.replace(up, address=proxy.address)

    def close(self) -> None:
        for proxy in self.proxies.values():
            proxy.close()
        self._inner.close()


class _ProxiedChild:
    def __init__(self, child: Child, launcher: ProxiedLauncher) -> None:
        self.spec = child.spec
        self._child = child
        self._launcher = launcher

    def started_within(self, timeout_s: float) -> ChildReady | None:
        up = self._child.started_within(timeout_s)
        if up is None or self.spec.kind == "router":
            return up
        self._launcher.direct[up.name] = up
        return self._launcher.reached(up)

    def loading(self) -> tuple[int, int] | None:
        return self._child.loading()

    def failure(self) -> str | None:
        return self._child.failure()

    def left(self) -> bool:
        return self._child.left()

    def leave(self, grace_s: float) -> None:
        self._child.leave(grace_s)

    def set_workers(self, prefill: list[PeerAddress], decode: list[PeerAddress]) -> None:
        self._child.set_workers(prefill, decode)

    def set_routers(self, routers: list[PeerAddress]) -> None:
        self._child.set_routers(routers)

    def ready(self) -> bool:
        return self._child.ready()

    def condemned(self) -> list[Verdict] | None:
        found = self._child.condemned()
        return None if found is None else found + self._launcher.accused

    def kill(self) -> None:
        self._child.kill()

    def stop(self, grace_s: float) -> None:
        self._child.stop(grace_s)
