"""The verbs' side of the admin surface (`cluster.admin`)."""

from typing import Any, TypeVar

import httpx
import msgspec

from cluster.admin import LONGEST_WAIT_S, Drain, Flights, Scale, Status
from cluster.admin_proof import CODE_HEADER, NONCE_HEADER, answer_code, is_right, new_nonce, request_code
from cluster.config import ConfigError
from cluster.processes.spec import LaunchError
from cluster.rundir import RunDir, command_line
from cluster.secret import SecretFile
from router.status.overview import Overview
from router.status.traffic import Traffic

QUICK_S = 15.0

T = TypeVar("T")


class NotRunning(LaunchError):
    """No cluster of this name runs on this host."""


class AdminClient:
    """Asks the admin surface. Every method raises NotRunning, or LaunchError with what the cluster answered, or that it
    did not within `quick_s` of when it should have."""

    def __init__(self, rundir: RunDir, quick_s: float = QUICK_S) -> None:
        self._rundir = rundir
        self._quick_s = quick_s
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(rundir.socket)), base_url="http://headrace"
        )

    def status(self) -> Status:
        return self._call("GET", "/status", Status)

    def overview(self) -> Overview:
        return self._call("GET", "/overview", Overview)

    def traffic(self) -> Traffic:
        return self._call("GET", "/traffic", Traffic)

    def flights(self, request: str = "") -> Flights:
        return self._call("GET", "/flights", Flights, params={"request": request})

    def config(self) -> dict[str, dict[str, object]]:
        return self._call("GET", "/config", dict[str, dict[str, object]])

    def drain(self, order: Drain) -> Status:
        """Blocks until the worker has left, or the order's time is over."""
        return self._order("/drain", order, order.timeout_s)

    def scale(self, order: Scale) -> Status:
        """Blocks until the pools have their sizes, or the order's time is over."""
        return self._order("/scale", order, order.timeout_s)

    def rotate(self) -> Status:
        """Blocks until every process has the new secret."""
        return self._order("/rotate", None, None)

    def down(self) -> Status:
        """Ask the supervisor to stop everything; returns at once."""
        return self._call("POST", "/down", Status)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> "AdminClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _order(self, path: str, order: msgspec.Struct | None, within_s: float | None) -> Status:
        """Give an order that takes up to `within_s`, or as long as it takes. A supervisor that answers nothing is given
        none: it would carry it out when it runs again, and until then nobody would know why nothing happens."""
        self.status()
        return self._call("POST", path, Status, order, within_s)

    def _call(
        self,
        method: str,
        path: str,
        kind: type[T],
        body: msgspec.Struct | None = None,
        within_s: float | None = 0.0,
        params: dict[str, str] | None = None,
    ) -> T:
        """Ask for what takes up to `within_s` there; None: however long it takes."""
        if not self._rundir.socket.exists() and not self._rundir.is_held:
            raise self._not_running()
        timeout_s = None if within_s is None else min(within_s, LONGEST_WAIT_S) + self._quick_s
        content = msgspec.json.encode(body) if body is not None else b""
        request = self._http.build_request(method, path, content=content, params=params, timeout=timeout_s)
        nonce = new_nonce()
        try:
            secret = SecretFile(self._rundir.secret).valid()[0]
            target = request.url.raw_path.decode()
            request.headers[NONCE_HEADER] = nonce
            request.headers[CODE_HEADER] = request_code(secret, method, target, nonce, content)
            response = self._http.send(request)
        except ConfigError as error:
            if self._rundir.is_held:
                raise LaunchError(f"the cluster {self._rundir.name!r} runs but cannot be asked: {error}") from error
            raise self._not_running() from error
        except httpx.TimeoutException as error:
            raise LaunchError(
                f"the supervisor of {self._rundir.name!r} did not answer in {timeout_s:.0f} s"
            ) from error
        except httpx.TransportError as error:
            if self._rundir.is_held:
                raise LaunchError(
                    f"the cluster {self._rundir.name!r} runs but its supervisor cannot be asked: {error}"
                ) from error
            raise self._not_running() from error
        expected = answer_code(secret, nonce, response.status_code, response.content)
        if response.status_code != 401 and not is_right(response.headers.get(CODE_HEADER, ""), [expected]):
            raise LaunchError(f"whoever answers for {self._rundir.name!r} does not have its secret")
        if response.status_code != 200:
            raise LaunchError(_reason(response))
        return msgspec.json.decode(response.content, type=kind)

    def _not_running(self) -> NotRunning:
        name = self._rundir.name
        return NotRunning(f"no cluster named {name!r} runs here (start one with: {command_line('up', name)})")


def _reason(response: httpx.Response) -> str:
    try:
        told: Any = msgspec.json.decode(response.content)
        return str(told["error"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"the supervisor answered {response.status_code}"
