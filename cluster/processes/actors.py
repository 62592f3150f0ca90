"""Ray actors: shells of a few lines around what `cluster.processes.hosting` builds. The only classes Ray sees."""

from cluster.processes.hosting import Hosted, moved, one_line
from cluster.processes.spec import ChildReady, ChildSpec, Sealed
from engine.handshake import Keyring
from engine.messages import PeerAddress
from router.core.escalation import Verdict


class HostActor:
    """Hosts one worker or router. `wait` blocks one of its threads; the other calls use the rest."""

    def __init__(self, spec: ChildSpec) -> None:
        self._spec = spec
        self._keyring = Keyring(spec.secrets.open())
        self._hosted: Hosted | None = None
        self._loading: tuple[int, int] | None = None

    def start(self) -> ChildReady | str:
        """Start the hosted object. Returns where it is reached, or in words why it could not start, since any error
        type may be unknown to the caller's process."""
        try:
            if not self._spec.host:
                import ray

                self._spec = moved(self._spec, ray.util.get_node_ip_address())
            self._hosted = Hosted(self._spec, self._keyring, self._load)
            return self._hosted.start()
        except Exception as error:
            return one_line(error)

    def loading(self) -> tuple[int, int] | None:
        """Return the bytes of weights that are loaded, and the bytes of all."""
        return self._loading

    def _load(self, done: int, total: int) -> None:
        self._loading = (done, total)

    def node(self) -> str:
        """Return the id of the Ray node that this actor is on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def wait(self) -> str:
        """Block until the hosted object ends. Returns why it failed, or an empty text."""
        try:
            self._host.wait()
        except Exception as error:
            return one_line(error)
        return ""

    def leave(self, grace_s: float) -> None:
        self._host.leave(grace_s)

    def set_secrets(self, secrets: Sealed) -> None:
        self._keyring.replace(secrets.open())

    def ask(self, what: str, argument: str) -> bytes | str:
        """Return the answer as JSON, or in words why there is none."""
        try:
            return self._host.ask(what, argument)
        except Exception as error:
            return one_line(error)

    def stop(self, grace_s: float) -> None:
        if self._hosted is not None:
            self._hosted.stop(grace_s)

    @property
    def _host(self) -> Hosted:
        if self._hosted is None:
            raise RuntimeError(f"{self._spec.name} was not started")
        return self._hosted


class PrefillActor(HostActor):
    """A prefill worker."""


class DecodeActor(HostActor):
    """A decode worker."""


class RouterActor(HostActor):
    """The router."""

    def set_workers(self, prefill: list[PeerAddress], decode: list[PeerAddress]) -> None:
        self._host.set_workers(prefill, decode)

    def set_routers(self, routers: list[PeerAddress]) -> None:
        self._host.set_routers(routers)

    def ready(self) -> bool:
        return self._host.ready()

    def condemned(self) -> list[Verdict]:
        return self._host.condemned()


ACTORS = {"prefill": PrefillActor, "decode": DecodeActor, "router": RouterActor}
