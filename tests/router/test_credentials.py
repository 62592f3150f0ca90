"""Both fronts of a router that asks for credentials, over real connections, with scripted workers behind it."""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import grpc
import httpx
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from access.client import ClientCredentials
from access.config import AccessConfig, AccessError
from access.keys import make_key
from access.tenants import CertificateName, CredentialTable, Tenant
from engine.identity import owner
from engine.messages import Place
from router.app import RouterApp
from router.config import RouterConfig
from router.front.api import ApiError, Delta, GenerateCall, Started
from router.front.namespaces import CacheNamespaces
from router.grpc.client import Client
from router.status.observer import NullObserver
from tests.access.certificates import Pair, make_authority, make_certificate
from tests.access.test_authenticator import write
from tests.router.fake_cluster import ByteText, FakeWorkers, until
from tests.secrets_of_tests import SECRETS

SLOW = [*b"a" * 200, 256]
CALL = GenerateCall(prompt="x")

SPACES = CacheNamespaces("k")


class Keys:
    """A keys file of three tenants and a monitor."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys.json"
        self.acme, acme = make_key("acme", "tenant", "")
        self.globex, globex = make_key("globex", "tenant", "")
        self.monitor, monitor = make_key("", "monitor", "")
        self.table = CredentialTable(
            tenants={"acme": Tenant(), "globex": Tenant()},
            keys=[acme, globex, monitor],
            certificates=[CertificateName(name="acme.example", tenant="acme")],
        )
        write(self.path, self.table)

    def change(self, **tenants: Tenant) -> None:
        write(self.path, msgspec.structs.replace(self.table, tenants=self.table.tenants | tenants))


class Certificates:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = make_authority(folder)
        self.server = make_certificate(folder, self.ca, "headrace", san="DNS:headrace.example,IP:127.0.0.1")
        self.acme = make_certificate(folder, self.ca, "acme", san="DNS:acme.example")
        other = make_authority(folder, "other")
        self.stranger = make_certificate(folder, other, "acme", file="stranger", san="DNS:acme.example")

    def config(self, **more: str) -> AccessConfig:
        return AccessConfig(cert_file=self.server.cert, key_file=self.server.key, **more)  # type: ignore[arg-type]

    def client(self, pair: Pair | None = None, api_key: str = "") -> ClientCredentials:
        cert, key = ("", "") if pair is None else (pair.cert, pair.key)
        return ClientCredentials(ca_file=self.ca.cert, cert_file=cert, key_file=key, api_key=api_key)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as one:
        yield one


class Site:
    """A router and what stands behind it."""

    def __init__(self, access: AccessConfig) -> None:
        config = RouterConfig(grpc_port=0, http_port=0, namespace_key="k", access=access)
        self.app = RouterApp(config, ByteText(), NullObserver(), SECRETS)
        self.workers = FakeWorkers()

    async def __aenter__(self) -> "Site":
        addresses = await self.app.start()
        self.grpc, self.http = addresses.grpc, addresses.http
        await self.workers.start()
        await self.app.set_workers(*self.workers.peers)
        await until(self.app.hub.ready)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.app.stop(0.0)
        await self.workers.stop()

    def url(self, path: str) -> str:
        return (self.http if "://" in self.http else f"http://{self.http}") + path

    async def ask(self, credentials: ClientCredentials, call: GenerateCall = CALL) -> str:
        async with Client(self.grpc, credentials) as client:
            return "".join([e.text async for e in client.agenerate(call) if isinstance(e, Delta)])

    async def refused(self, credentials: ClientCredentials, call: GenerateCall = CALL) -> ApiError:
        with pytest.raises(ApiError) as raised:
            await self.ask(credentials, call)
        return raised.value

    def spaces(self) -> list[bytes]:
        return [record.record.namespace for record in self.workers.got if isinstance(record, Place)]


def served(runner: asyncio.Runner, access: AccessConfig, body: Callable[[Site], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(60), Site(access) as site:
            await body(site)

    runner.run(whole())


def by_key(key: str) -> ClientCredentials:
    return ClientCredentials(api_key=key)


def shown(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_router_for_this_machine_is_guarded_from_pages(runner: asyncio.Runner) -> None:
    """Guards against a guard that nothing stands behind (tests/router/http/test_browsers.py)."""

    async def body(site: Site) -> None:
        page = {"origin": "https://page.example", "content-type": "text/plain"}
        named = {"host": f"page.example:{httpx.URL(site.url('/')).port}"}
        async with httpx.AsyncClient() as client:
            sent = await client.post(site.url("/v1/completions"), content=b'{"prompt": "x"}', headers=page)
            read = await client.get(site.url("/v1/models"), headers=named)
        assert (sent.status_code, read.status_code, site.spaces()) == (415, 421, [])

    served(runner, AccessConfig(), body)


def test_grpc_asks_for_a_key_and_takes_the_tenant_from_it(runner: asyncio.Runner, keys: Keys) -> None:
    """Guards a tenant that is believed because a field says so."""

    async def body(site: Site) -> None:
        assert await site.ask(by_key(keys.acme)) == "hello world"
        assert await site.ask(by_key(keys.acme), GenerateCall(prompt="x", tenant="acme"))
        assert site.spaces() == [SPACES.of("acme")] * 2
        error = await site.refused(by_key(keys.acme), GenerateCall(prompt="x", tenant="globex"))
        assert (error.code, error.field) == ("PERMISSION_DENIED", "tenant")
        for wrong in ("", "hr_nonsense", keys.acme + "x"):
            assert (await site.refused(by_key(wrong))).code == "UNAUTHENTICATED"
        assert (await site.refused(by_key(keys.monitor))).code == "PERMISSION_DENIED"
        with pytest.raises(ApiError, match="an API key is needed"):
            await asyncio.to_thread(Client(site.grpc).models)
        async with grpc.aio.insecure_channel(site.grpc) as channel:
            probe = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert probe.status == health_pb2.HealthCheckResponse.SERVING
        assert len(site.spaces()) == 2, "no refused call reached a worker"

    served(runner, AccessConfig(keys_file=str(keys.path)), body)


def test_http_asks_for_a_key_but_for_probes(runner: asyncio.Runner, keys: Keys) -> None:
    async def body(site: Site) -> None:
        async with httpx.AsyncClient() as client:

            async def post(headers: dict[str, str], **more: object) -> httpx.Response:
                return await client.post(site.url("/v1/completions"), headers=headers, json={"prompt": "x"} | more)

            assert (await post(shown(keys.acme))).json()["choices"][0]["text"] == "hello world"
            assert (await post(shown(keys.globex), tenant="globex")).status_code == 200
            assert site.spaces() == [SPACES.of("acme"), SPACES.of("globex")]
            for wrong in ({}, shown("hr_x_y"), shown(keys.acme[:-1]), {"authorization": f"Basic {keys.acme}"}):
                answer = await post(wrong)
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "unauthenticated"
                assert answer.headers["www-authenticate"] == "Bearer"
            answer = await post(shown(keys.acme), tenant="globex")
            assert answer.status_code == 403 and answer.json()["error"]["param"] == "tenant"
            twice = [("authorization", f"Bearer {keys.acme}"), ("authorization", f"Bearer {keys.globex}")]
            assert (await client.get(site.url("/v1/models"), headers=twice)).status_code == 401
            for path, anyone, tenant, monitor in (
                *(("/health", 200, 200, 200), ("/ready", 200, 200, 200), ("/", 200, 200, 200)),
                *(("/metrics", 401, 403, 200), ("/sd", 401, 403, 200)),
                *(("/v1/models", 401, 200, 200), ("/version", 401, 200, 200), ("/nowhere", 401, 404, 404)),
            ):
                found = [
                    (await client.get(site.url(path), headers=headers)).status_code
                    for headers in ({}, shown(keys.acme), shown(keys.monitor))
                ]
                assert found == [anyone, tenant, monitor], path
            assert len(site.spaces()) == 2

    served(runner, AccessConfig(keys_file=str(keys.path)), body)


def test_a_salt_over_http_only_narrows_the_namespace_of_the_key(runner: asyncio.Runner, keys: Keys) -> None:
    """Guards a salt that leads two keys into one part of the cache, or one key back out of its own: what a worker is
    told is the part of the cache that a request may find blocks in."""

    async def body(site: Site) -> None:
        asked = [(key, salt) for key in (keys.acme, keys.globex) for salt in (None, "s", "t", "s")]
        async with httpx.AsyncClient() as client:
            for path, text in (
                ("/v1/completions", {"prompt": "x"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ):
                for key, salt in asked:
                    fields = text if salt is None else text | {"cache_salt": salt}
                    answer = await client.post(site.url(path), headers=shown(key), json=fields)
                    assert answer.status_code == 200, answer.text
        for spaces in (site.spaces()[:8], site.spaces()[8:]):
            plain, salted, other, again, *globex = spaces
            assert plain == SPACES.of("acme") and globex[0] == SPACES.of("globex")
            assert again == salted and globex[3] == globex[1], "the same key finds with the same salt what it left"
            assert len(set(spaces)) == 6, "nobody else does, and the key with another salt, or with none, does not"
            assert {owner(one) for one in spaces[:4]} == {plain} and {owner(one) for one in globex} == {globex[0]}
            assert salted.startswith(plain) and other.startswith(plain)

    served(runner, AccessConfig(keys_file=str(keys.path)), body)


@pytest.mark.parametrize("shared_cache", ["", "common"])
def test_a_stream_is_resumed_and_ended_by_its_own_tenant_alone(
    runner: asyncio.Runner, keys: Keys, shared_cache: str
) -> None:
    """Guards a resume token that is worth something to another tenant, one that shares the cache too."""
    keys.change(acme=Tenant(shared_cache=shared_cache), globex=Tenant(shared_cache=shared_cache))

    async def body(site: Site) -> None:
        site.workers.answer = SLOW
        call = GenerateCall(prompt="x", resumable=True)
        async with (
            Client(site.grpc, by_key(keys.acme)) as client,
            aclosing(client.agenerate(call)) as events,  # type: ignore[type-var]
            httpx.AsyncClient() as web,
        ):
            started = await anext(events)  # type: ignore[arg-type]
            assert isinstance(started, Started)
            url = site.url(f"/v1/streams/{started.resume_token}")
            assert (await web.delete(url, headers=shown(keys.globex))).status_code == 404
            assert (await web.get(url, headers=shown(keys.globex))).status_code == 404
            assert (await web.get(url, headers=shown(keys.monitor))).status_code == 403
            assert (await web.get(url)).status_code == 401
            assert (await web.delete(url, headers=shown(keys.acme))).status_code == 204

    served(runner, AccessConfig(keys_file=str(keys.path)), body)


def test_limits_of_a_tenant_are_told_with_the_time_to_come_back(runner: asyncio.Runner, keys: Keys) -> None:
    keys.change(acme=Tenant(concurrency=1), globex=Tenant(tokens_per_s=1, burst_tokens=5))

    async def body(site: Site) -> None:
        async with httpx.AsyncClient() as web, Client(site.grpc, by_key(keys.acme)) as client:
            url, text = site.url("/v1/completions"), {"prompt": "x"}
            site.workers.hold = True
            async with aclosing(client.agenerate(CALL)) as events:  # type: ignore[type-var]
                first = asyncio.ensure_future(anext(events))  # type: ignore[arg-type]
                await until(lambda: site.app.hub.core.open == 1)
                error = await site.refused(by_key(keys.acme))
                assert error.code == "RESOURCE_EXHAUSTED" and error.retry_after_s == 1.0
                answer = await web.post(url, headers=shown(keys.acme), json=text)
                assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
                answer = await web.post(url, headers=shown(keys.acme), json=text | {"n": 2})
                assert answer.status_code == 400 and answer.json()["error"]["param"] == "n"
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            site.workers.hold = False
            await until(lambda: "acme=0" in repr(site.app._limits) or "acme" not in repr(site.app._limits))
            assert await site.ask(by_key(keys.acme)) == "hello world"
            assert await site.ask(by_key(keys.globex)) == "hello world"
            answer = await web.post(url, headers=shown(keys.globex), json=text)
            assert answer.status_code == 429 and 6 <= int(answer.headers["retry-after"]) <= 10
            assert answer.json()["error"]["code"] == "resource_exhausted"
            assert await site.ask(by_key(keys.acme)) == "hello world", "what one tenant used is its own"

    served(runner, AccessConfig(keys_file=str(keys.path)), body)


def test_a_key_is_revoked_without_a_restart(
    runner: asyncio.Runner, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards a stolen key that lives on until somebody dares a restart; also on a connection that is open already."""

    async def body(site: Site) -> None:
        async with Client(site.grpc, by_key(keys.acme)) as client:
            assert [e async for e in client.agenerate(CALL)]
            write(keys.path, msgspec.structs.replace(keys.table, keys=keys.table.keys[1:]))
            with pytest.raises(ApiError) as raised:
                for _ in range(100):
                    await asyncio.sleep(0.1)
                    assert [e async for e in client.agenerate(CALL)]
            assert raised.value.code == "UNAUTHENTICATED"
        assert await site.ask(by_key(keys.globex)) == "hello world"

    with caplog.at_level(logging.DEBUG):
        served(runner, AccessConfig(keys_file=str(keys.path)), body)
    secrets = [keys.acme, keys.globex, *(key.sha256 for key in keys.table.keys)]
    assert "was read again" in caplog.text and not any(secret in caplog.text for secret in secrets)
    assert keys.acme not in repr(by_key(keys.acme))


def test_mutual_tls_names_the_tenant_on_grpc(
    runner: asyncio.Runner, keys: Keys, certificates: Certificates
) -> None:
    access = certificates.config(keys_file=str(keys.path), client_ca_file=certificates.ca.cert)

    async def body(site: Site) -> None:
        assert await site.ask(certificates.client(certificates.acme)) == "hello world"
        assert site.spaces() == [SPACES.of("acme")]
        for none in (certificates.client(), certificates.client(certificates.stranger), by_key(keys.acme)):
            assert (await site.refused(none)).code == "UNAVAILABLE", "the handshake is refused"
        both = await site.refused(certificates.client(certificates.acme, keys.globex))
        assert both.code == "PERMISSION_DENIED"
        gateway = certificates.client(certificates.server, keys.globex)
        assert await site.ask(gateway) == "hello world"
        assert site.spaces()[1:] == [SPACES.of("globex")]

    served(runner, access, body)


def test_mutual_tls_on_http_lets_probes_in(runner: asyncio.Runner, keys: Keys, certificates: Certificates) -> None:
    access = certificates.config(keys_file=str(keys.path), client_ca_file=certificates.ca.cert)

    async def body(site: Site) -> None:
        assert site.http.startswith("https://")
        async with httpx.AsyncClient(verify=certificates.client().ssl_context()) as probe:
            assert (await probe.get(site.url("/health"))).status_code == 200
            assert (await probe.get(site.url("/ready"))).status_code == 200
            for headers in ({}, shown(keys.acme), shown(keys.monitor)):
                for path in ("/metrics", "/v1/models"):
                    assert (await probe.get(site.url(path), headers=headers)).status_code == 401, path
        async with httpx.AsyncClient(verify=certificates.client(certificates.acme).ssl_context()) as acme:
            assert (await acme.post(site.url("/v1/completions"), json={"prompt": "x"})).status_code == 200
            assert site.spaces() == [SPACES.of("acme")]
            assert (await acme.get(site.url("/metrics"))).status_code == 403
            assert (await acme.get(site.url("/metrics"), headers=shown(keys.monitor))).status_code == 200
        async with httpx.AsyncClient(verify=certificates.client(certificates.stranger).ssl_context()) as stranger:
            with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
                await stranger.get(site.url("/health"))
        async with httpx.AsyncClient() as plain:
            with pytest.raises(httpx.RemoteProtocolError):
                await plain.get(site.url("/health").replace("https", "http"))

    served(runner, access, body)


def test_certificates_are_renewed_without_a_restart(runner: asyncio.Runner, tmp_path: Path) -> None:
    """Guards a cluster that is down on the day its certificate expires, and an authority that is not let go."""
    mine = Certificates(tmp_path)
    access = mine.config(client_ca_file=mine.ca.cert)

    async def body(site: Site) -> None:
        before = mine.client(mine.acme)
        assert await site.ask(before) == "hello world"
        assert site.spaces() == [SPACES.of("acme.example")]
        # Half of it: the new key with the old certificate serves nobody, so the old pair stays.
        key = Path(mine.server.key).read_bytes()
        make_certificate(tmp_path, mine.ca, "headrace", file="next", san="IP:127.0.0.1")
        Path(mine.server.key).write_bytes((tmp_path / "next.key").read_bytes())
        assert await site.ask(before) == "hello world"
        Path(mine.server.key).write_bytes(key)
        # All of it, with another authority for both sides.
        ca = make_authority(tmp_path, "ca")
        make_certificate(tmp_path, ca, "headrace", san="DNS:headrace.example,IP:127.0.0.1")
        new = make_certificate(tmp_path, ca, "globex", san="DNS:globex.example")
        assert await site.ask(mine.client(new)) == "hello world"
        async with httpx.AsyncClient(verify=mine.client(new).ssl_context()) as web:
            assert (await web.get(site.url("/v1/models"))).status_code == 200
        assert (await site.refused(mine.client(mine.acme))).code == "UNAVAILABLE", "it is of the old authority"
        assert (await site.refused(before)).code == "UNAVAILABLE"
        late = ssl.create_default_context(cafile=mine.ca.cert)
        late.load_cert_chain(mine.acme.cert, mine.acme.key)
        async with httpx.AsyncClient(verify=late) as web:
            with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
                await web.get(site.url("/health"))

    served(runner, access, body)


def test_a_router_listens_nowhere_else_without_being_told() -> None:
    with pytest.raises(AccessError, match=r"0\.0\.0\.0.*access\.insecure=open"):
        RouterApp(RouterConfig(host="0.0.0.0"), ByteText(), NullObserver(), SECRETS)
    RouterApp(RouterConfig(host="0.0.0.0", access=AccessConfig(insecure="open")), ByteText(), NullObserver(), SECRETS)
