"""Keys that something else knows: a URL that is asked, and tokens of an OpenID provider that the test is."""

import asyncio
import base64
import contextlib
import hmac
import json
import sys
import time

import pytest

from tests.router.fakes import FakeWorker, routing
from tests.router.test_tenant_keys import ADMIN, bearer, entry, usage, write
from tokenyard.base import ConfigError
from tokenyard.router import checked_keys
from tokenyard.router.router_settings import RouterSettings
from tokenyard.router.tenant_keys import TenantKeys

BOSS = {"admin_api_key": "boss", "worker_api_key": "fleet"}


def run(coroutine):
    asyncio.run(coroutine)


class Authority:
    """A server whose answers are `pages`, by path: (status, object), or a function of the request's key that says so.
    `asked` are the keys and paths that were asked for.
    """

    def __init__(self, **pages):
        self.pages, self.asked, self.delay_s = pages, [], 0.0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()

    async def _serve(self, reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                path = head.split(" ")[1].rpartition("/")[2]
                fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
                key = {name.lower(): value for name, value in fields.items()}.get("authorization", "")
                key = key.removeprefix("Bearer ")
                self.asked.append((path, key))
                await asyncio.sleep(self.delay_s)
                page = self.pages.get(path.replace("-", "_"), (404, {}))
                status, content = page(key) if callable(page) else page
                body = json.dumps(content).encode()
                writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)


KEYS = {
    "ka": (200, {"tenant": "acme", "requests_per_minute": 3, "models": ["m"]}),
    "old": (200, {"tenant": "acme", "expires": "2020-01-01"}),
    "denied": (403, {}),
    "broken": (200, {"tenant": "acme", "request_per_minute": 3}),
    "moved": (302, {}),
    "list": (200, [1]),
}


def test_a_url_says_whose_key_it_is_and_what_it_allows(tmp_path, monkeypatch):
    monkeypatch.setattr(checked_keys, "FAILED_S", 0.05)
    keys = write(tmp_path / "keys.yaml", entry("kf", "file"))

    async def main():
        async with (
            Authority(check=lambda key: KEYS.get(key, (401, {}))) as authority,
            FakeWorker(on_request=usage) as worker,
            routing(worker, auth_url=f"{authority.url}/check", api_key="own", keys_file=keys, **BOSS) as (_, client),
        ):
            for key, status, code in (
                ("x", 401, "invalid_api_key"),
                ("denied", 401, "invalid_api_key"),
                ("old", 401, "expired_api_key"),
                ("broken", 503, "key_check_failed"),
                ("moved", 503, "key_check_failed"),
                ("list", 503, "key_check_failed"),
            ):
                got = await client.complete(model="m", headers=bearer(key))
                assert (got.status, got.error) == (status, code), key
            assert (await client.complete(model="m")).status == 401
            assert worker.asked == []
            # Many at once are one check; and what it allows holds for all of them.
            asked = len(authority.asked)
            several = [client.complete(model="m", headers=bearer("ka")) for _ in range(5)]
            assert sorted(got.status for got in await asyncio.gather(*several)) == [200, 200, 200, 429, 429]
            assert (await client.complete(model="n", headers=["X-Api-Key: ka"])).error == "not_allowed"
            assert {one.headers["x-tokenyard-tenant"] for one in worker.asked} == {"acme"}
            assert {one.headers["authorization"] for one in worker.asked} == {"Bearer fleet"}
            assert (await client.ask("GET", "/usage", headers=bearer("ka"))).status == 401
            assert authority.asked[asked:] == [("check", "ka")]
            # The router's own keys, and those of the file, are nobody else's business.
            for key in ("own", "kf"):
                assert (await client.complete(model="m", headers=bearer(key))).status == 200
            assert (await client.ask("GET", "/usage", headers=ADMIN)).status == 200
            assert len(authority.asked) == asked + 1

    run(main())


def test_a_key_that_cannot_be_checked_in_time_is_refused_and_checked_again(monkeypatch):
    monkeypatch.setattr(checked_keys, "FAILED_S", 0.05)

    async def main():
        async with (
            Authority(check=lambda key: KEYS[key]) as authority,
            FakeWorker(on_request=usage) as worker,
            routing(worker, auth_url=f"{authority.url}/check", auth_timeout_secs=0.1, auth_cache_secs=0.2, **BOSS) as (
                _,
                client,
            ),
        ):
            authority.delay_s = 5.0
            begin = time.monotonic()
            got = await client.complete(model="m", headers=bearer("ka"))
            assert (got.status, got.error) == (503, "key_check_failed")
            assert time.monotonic() - begin < 2
            authority.delay_s = 0.0
            await asyncio.sleep(0.1)
            assert (await client.complete(model="m", headers=bearer("ka"))).status == 200
            # What a key has used outlives the check; a key that is withdrawn is refused once it is checked again.
            await asyncio.sleep(0.25)
            for status in (200, 200, 429):
                assert (await client.complete(model="m", headers=bearer("ka"))).status == status
            monkeypatch.setitem(KEYS, "ka", (401, {}))
            await asyncio.sleep(0.25)
            assert (await client.complete(model="m", headers=bearer("ka"))).error == "invalid_api_key"

    run(main())


class Issuer:
    """An OpenID provider with a key of each kind."""

    def __init__(self):
        rsa = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.rsa")
        from cryptography.hazmat.primitives.asymmetric import ec
        from jwt.algorithms import ECAlgorithm, RSAAlgorithm

        self.rsa, self.ec = rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP256R1())
        public = {
            "rsa": RSAAlgorithm.to_jwk(self.rsa.public_key(), as_dict=True) | {"alg": "RS256"},
            "ec": ECAlgorithm.to_jwk(self.ec.public_key(), as_dict=True),
        }
        shared = {"kty": "oct", "kid": "oct", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0"}
        self.published = [*(key | {"kid": name} for name, key in public.items()), shared]

    def token(self, key=None, kid="rsa", algorithm="RS256", **claims):
        import jwt

        wanted = {"iss": self.url, "aud": "yard", "sub": "anna", "exp": time.time() + 60} | claims
        wanted = {name: value for name, value in wanted.items() if value is not None}
        return jwt.encode(wanted, self.rsa if key is None else key, algorithm, headers={"kid": kid} if kid else None)


def signed_with(secret, token):
    """The claims of a token, signed with HS256: jwt refuses to do this with a public key."""
    claims = token.split(".")[1]
    head = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"rsa"}').rstrip(b"=").decode()
    mark = hmac.digest(secret, f"{head}.{claims}".encode(), "sha256")
    return f"{head}.{claims}.{base64.urlsafe_b64encode(mark).rstrip(b'=').decode()}"


def test_tokens_of_an_openid_provider():
    issuer = Issuer()
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    async def main():
        async with Authority() as authority, FakeWorker(on_request=usage) as worker:
            issuer.url = authority.url
            authority.pages["openid_configuration"] = (200, {"issuer": issuer.url, "jwks_uri": f"{issuer.url}/keys"})
            authority.pages["keys"] = (200, {"keys": issuer.published})
            settings = {"oidc_issuer": issuer.url, "oidc_audience": "yard", **BOSS}
            async with routing(worker, **settings) as (router, client):

                async def refusal(token):
                    got = await client.complete(model="m", headers=bearer(token))
                    return got.status, got.json.get("error", {}).get("code")

                assert await refusal(issuer.token()) == (200, None)
                assert await refusal(issuer.token(issuer.ec, "ec", "ES256")) == (200, None)
                limits = {"tenant": "acme", "requests_per_minute": 1, "models": ["m"]}
                # Two tokens of one subject have one limit.
                assert await refusal(issuer.token(tokenyard=limits)) == (200, None)
                assert await refusal(issuer.token(tokenyard=limits, jti="2")) == (429, "tenant_limit")
                assert {row["tenant"] for row in router.metrics.usage_rows()} == {"anna", "acme"}
                public = issuer.rsa.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
                wrong = {
                    "no token": "x",
                    "cut": issuer.token()[:-9],
                    "alg none": issuer.token("", algorithm="none"),
                    "the public key as a secret": signed_with(public, issuer.token()),
                    "a published secret": issuer.token(b"secret" * 6, "oct", "HS256"),
                    "another's key": issuer.token(rsa.generate_private_key(65537, 2048)),
                    "another algorithm than the key's": issuer.token(algorithm="RS512"),
                    "a key of another kind": issuer.token(kid="ec"),
                    "an unknown key": issuer.token(kid="new"),
                    "another issuer": issuer.token(iss="http://elsewhere"),
                    "another audience": issuer.token(aud="other"),
                    "no audience": issuer.token(aud=None),
                    "no expiry": issuer.token(exp=None),
                    "not yet": issuer.token(nbf=time.time() + 60),
                }
                for why, token in wrong.items():
                    assert await refusal(token) == (401, "invalid_api_key"), why
                assert await refusal(issuer.token(exp=time.time() - 1)) == (401, "expired_api_key")
                assert await refusal(issuer.token(sub=None)) == (403, "not_allowed")
                assert await refusal(issuer.token(tokenyard={"quota": 3})) == (403, "not_allowed")
                assert [path for path, _ in authority.asked] == ["openid-configuration", "keys"]
                # A token that expires is refused then, though it was good when it was checked.
                brief = issuer.token(exp=time.time() + 1)
                assert await refusal(brief) == (200, None)
                await asyncio.sleep(1.1)
                assert await refusal(brief) == (401, "expired_api_key")
                assert len(worker.asked) == 4

    run(main())


def test_keys_of_an_issuer_that_cannot_be_read_open_nothing(monkeypatch):
    issuer = Issuer()
    monkeypatch.setattr(checked_keys, "FAILED_S", 0.05)
    monkeypatch.setattr(checked_keys, "JWKS_RELOAD_S", 0.05)

    async def main():
        async with Authority() as authority, FakeWorker(on_request=usage) as worker:
            issuer.url = authority.url
            settings = {"oidc_issuer": issuer.url, "oidc_audience": "yard", **BOSS}
            async with routing(worker, **settings) as (_, client):

                async def ask(**claims):
                    await asyncio.sleep(0.1)
                    return await client.complete(model="m", headers=bearer(issuer.token(**claims)))

                assert (await ask()).error == "key_check_failed"
                place = {"issuer": "http://elsewhere", "jwks_uri": f"{issuer.url}/keys"}
                authority.pages |= {"openid_configuration": (200, place), "keys": (200, {"keys": issuer.published[1:]})}
                assert (await ask()).error == "key_check_failed"
                place["issuer"] = issuer.url
                assert (await ask()).error == "invalid_api_key"
                # A key that the issuer has begun to use since.
                authority.pages["keys"] = (200, {"keys": issuer.published})
                assert (await ask(jti="2")).status == 200
                # The provider is away: its keys serve on.
                authority.pages.clear()
                assert (await ask(jti="3")).status == 200
                assert (await ask(kid="new")).error == "invalid_api_key"

    run(main())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"auth_url": "http://a/b"}, "--admin-api-key"),
        ({"auth_url": "http://a/b", "oidc_issuer": "http://a", "oidc_audience": "b", **BOSS}, "leave one of them out"),
        ({"oidc_issuer": "http://a", **BOSS}, "--oidc-audience"),
        ({"auth_url": "auth.example.com", **BOSS}, "--auth-url must be a URL"),
        ({"oidc_issuer": "keycloak", "oidc_audience": "b", **BOSS}, "--oidc-issuer must be a URL"),
    ],
)
def test_wrong_settings_are_named(fields, says):
    with pytest.raises(ConfigError, match=says):
        TenantKeys(RouterSettings(**fields))


def test_without_the_packages_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jwt", None)
    with pytest.raises(ConfigError, match=r"pip install 'tokenyard\[oidc\]'"):
        TenantKeys(RouterSettings(oidc_issuer="http://a", oidc_audience="b", **BOSS))
