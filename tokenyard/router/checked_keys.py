"""API keys that something else knows: a URL that is asked, like nginx's auth_request, or tokens of an OpenID provider.

What is known of a key is kept for a while, so that most requests wait for nothing. A key that cannot be checked is
refused.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import aiohttp
import orjson

from tokenyard.base import ConfigError
from tokenyard.router.api_keys import read_grant
from tokenyard.router.errors import RouterError
from tokenyard.router.router_settings import RouterSettings
from tokenyard.routing.tenant_limits import KeyGrant, KeyUsage

log = logging.getLogger(__name__)

MAX_KNOWN = 10_000
"""The most good keys that are remembered, and the most bad ones."""

MAX_CHECKS = 256
"""Keys that are checked at a time; further ones are refused."""

REFUSED_S = 5.0
FAILED_S = 1.0
"""How long a wrong key is refused, and one that could not be checked."""

MAX_ANSWER_BYTES = 1 << 20
JWKS_REFRESH_S = 3600.0
JWKS_RELOAD_S = 10.0
"""Pause before an unknown key id makes the router read the provider's keys again."""

JWKS_STALE_S = 24 * 3600.0
"""How long the provider's keys serve while it cannot be reached."""

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures by a private key alone: with HS256 a token signed with the public key would be valid."""

LIMITS_CLAIM = "tokenyard"
PACKAGES = "--oidc-issuer needs the packages PyJWT and cryptography: pip install 'tokenyard[oidc]'"


class CheckFailedError(Exception):
    """A key could not be checked."""


@dataclass(frozen=True, slots=True)
class CheckedKey:
    """A key that is good.

    identity: whose limits it counts against; keys of one identity share them.
    until_s: Unix time at which it must be checked again; infinite for never.
    """

    identity: str
    grant: KeyGrant
    until_s: float = float("inf")


class KeyChecker(Protocol):
    """Something that knows keys."""

    async def check(self, key: bytes) -> CheckedKey:
        """What a key allows. Raises RouterError (401) for a wrong one; any other error says that it cannot tell."""

    async def close(self) -> None:
        """Close its connections."""


@dataclass(slots=True)
class _Entry:
    usage: KeyUsage | None
    error: RouterError | None
    until_s: float


class CheckedKeys:
    """What is known of keys. Used from one event loop.

    timeout_s: how long a request waits for the check of its key.
    cache_s: how long a good key is not checked again.
    """

    def __init__(self, checker: KeyChecker, *, timeout_s: float, cache_s: float) -> None:
        self._checker, self._timeout_s, self._cache_s = checker, timeout_s, cache_s
        self._good: OrderedDict[bytes, _Entry] = OrderedDict()
        self._bad: OrderedDict[bytes, _Entry] = OrderedDict()
        self._checks: dict[bytes, asyncio.Task[None]] = {}
        self._usages: WeakValueDictionary[tuple[str, KeyGrant], KeyUsage] = WeakValueDictionary()

    def pending(self, key: bytes) -> bool:
        """Whether a key must be checked before `find` knows it."""
        return self._entry(sha256(key).digest()) is None

    def find(self, key: bytes) -> KeyUsage:
        """What belongs to a key that was checked. Raises RouterError (401, 503) for one that is refused."""
        entry = self._entry(sha256(key).digest())
        if entry is None:
            raise _failed()
        if entry.usage is None:
            assert entry.error is not None
            raise entry.error
        return entry.usage

    def begin(self, key: bytes) -> "asyncio.Task[None] | None":
        """Check a key, unless it is being checked; returns the check, None where too many run."""
        digest = sha256(key).digest()
        if digest not in self._checks and len(self._checks) < MAX_CHECKS:
            self._checks[digest] = asyncio.get_running_loop().create_task(self._check(digest, key))
        return self._checks.get(digest)

    async def check(self, key: bytes) -> None:
        """Check a key; `find` knows the result."""
        if (running := self.begin(key)) is not None:
            await asyncio.shield(running)

    async def close(self) -> None:
        """End all checks."""
        for task in list(self._checks.values()):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self._checker.close()

    def _entry(self, digest: bytes) -> _Entry | None:
        entry = self._good.get(digest) or self._bad.get(digest)
        return entry if entry is not None and time.time() < entry.until_s else None

    async def _check(self, digest: bytes, key: bytes) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                checked = await self._checker.check(key)
            until_s = min(checked.until_s, time.time() + self._cache_s)
            _keep(self._good, digest, _Entry(self._usage_of(checked), None, until_s))
            self._bad.pop(digest, None)
        except RouterError as error:
            self._refuse(digest, error, REFUSED_S)
        except Exception as error:
            known = isinstance(error, CheckFailedError | ConfigError | aiohttp.ClientError | OSError)
            log.error("an API key cannot be checked: %s", str(error) or "no answer in time", exc_info=not known)
            self._refuse(digest, _failed(), FAILED_S)
        finally:
            del self._checks[digest]

    def _refuse(self, digest: bytes, error: RouterError, seconds: float) -> None:
        self._good.pop(digest, None)
        _keep(self._bad, digest, _Entry(None, error, time.time() + seconds))

    def _usage_of(self, checked: CheckedKey) -> KeyUsage:
        """The limits of an identity, with what is used of them unless they have changed."""
        place = checked.identity, checked.grant
        usage = self._usages.get(place)
        if usage is None:
            usage = self._usages[place] = KeyUsage(checked.grant)
        return usage


def _keep(entries: OrderedDict[bytes, _Entry], digest: bytes, entry: _Entry) -> None:
    entries[digest] = entry
    entries.move_to_end(digest)
    if len(entries) > MAX_KNOWN:
        entries.popitem(last=False)


def _failed() -> RouterError:
    return RouterError(503, "API keys cannot be checked now; try again", code="key_check_failed")


def _refused(why: str) -> RouterError:
    return RouterError(401, f"{why}; a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")


class _Client:
    """Reads small JSON objects over HTTP."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def get(self, url: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """Status and body of a response; redirects are not followed. Raises CheckFailedError for a long one."""
        if self._session is None:
            self._session = aiohttp.ClientSession()
        async with self._session.get(url, headers=headers, allow_redirects=False) as response:
            body = b""
            async for part in response.content.iter_any():
                body += part
                if len(body) > MAX_ANSWER_BYTES:
                    raise CheckFailedError(f"{_place(url)} answers more than {MAX_ANSWER_BYTES} bytes")
            return response.status, body

    async def object(self, url: str, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The JSON object at a URL. Raises CheckFailedError for anything else."""
        status, body = await self.get(url, headers)
        return _object(url, status, body)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()


def _object(url: str, status: int, body: bytes) -> dict[str, Any]:
    if status != 200:
        raise CheckFailedError(f"{_place(url)} answers {status}")
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise CheckFailedError(f"{_place(url)} does not answer with a JSON object")
    return found


def _place(url: str) -> str:
    """A URL without what may be secret in it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}{parts.path}"


def check_url(flag: str, url: str) -> None:
    """Raise ConfigError for an invalid URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{flag} must be a URL such as https://auth.example.com/check, not {url[:200]!r}")


class AuthUrl:
    """A URL that says whose key a request carries.

    It gets the key as a bearer token. 200 with a JSON object of the fields of `--keys-file` opens the router, 401 and
    403 do not.
    """

    def __init__(self, url: str) -> None:
        """Raises ConfigError for an invalid URL."""
        check_url("--auth-url", url)
        self._url, self._client = url, _Client()

    async def check(self, key: bytes) -> CheckedKey:
        """See KeyChecker."""
        status, body = await self._client.get(self._url, {"authorization": f"Bearer {key.decode('latin-1')}"})
        if status in (401, 403):
            raise _refused("this API key is not known")
        grant = read_grant(_object(self._url, status, body), f"the answer of {_place(self._url)}")
        return CheckedKey(sha256(key).hexdigest(), grant)

    async def close(self) -> None:
        """See KeyChecker."""
        await self._client.close()


class OidcTokens:
    """Tokens (JWT) of an OpenID provider, which it signs with keys that it publishes.

    Expiry, issuer and audience must be right. Tenant and limits are the claim `tokenyard`, an object with the fields of
    `--keys-file`, or the tenant is the claim `tenant_claim`. All tokens of one subject count against the same limits.
    """

    def __init__(self, issuer: str, audience: str, tenant_claim: str) -> None:
        """Raises ConfigError if the issuer is not a URL, and without the packages."""
        check_url("--oidc-issuer", issuer)
        try:
            import jwt
            from jwt.algorithms import has_crypto
        except ImportError:
            raise ConfigError(PACKAGES) from None
        if not has_crypto:
            raise ConfigError(PACKAGES)
        self._jwt: Any = jwt
        self._issuer, self._audience, self._tenant_claim = issuer, audience, tenant_claim
        self._client = _Client()
        self._keys: dict[str | None, _Signer] = {}
        self._read_s = self._tried_s = float("-inf")
        self._reading = asyncio.Lock()

    async def check(self, key: bytes) -> CheckedKey:
        """See KeyChecker."""
        jwt, token = self._jwt, key.decode("latin-1")
        try:
            head = jwt.get_unverified_header(token)
        except jwt.PyJWTError:
            raise _refused("the API key is no token (JWT)") from None
        algorithm = head.get("alg")
        if algorithm not in ALGORITHMS:
            raise _refused(f"tokens must be signed with one of {', '.join(ALGORITHMS)}")
        signer = await self._signer(head.get("kid"))
        if signer is None or (signer.alg and signer.alg != algorithm):
            raise _refused("the token is signed with a key that the issuer does not publish")
        try:
            claims = jwt.decode(
                *(token, signer.key),
                algorithms=[algorithm],
                audience=self._audience,
                issuer=self._issuer,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.ExpiredSignatureError:
            raise RouterError(401, "this token has expired; get another one", code="expired_api_key") from None
        except (jwt.PyJWTError, TypeError, ValueError) as error:
            # The last two are a key of another kind than the algorithm's.
            raise _refused(f"the token is not valid: {error}") from None
        return self._checked(claims)

    async def close(self) -> None:
        """See KeyChecker."""
        await self._client.close()

    def _checked(self, claims: Mapping[str, Any]) -> CheckedKey:
        limits = claims.get(LIMITS_CLAIM, {})
        tenant = claims.get(self._tenant_claim)
        entry = {"tenant": tenant} | limits if isinstance(limits, dict) else limits
        try:
            grant = read_grant(entry, "the token")
        except ConfigError as error:
            raise RouterError(403, f"the token cannot be used: {error.message}", code="not_allowed") from None
        subject = claims.get("sub")
        return CheckedKey(f"{grant.tenant}\0{subject}", grant, float(claims["exp"]))

    async def _signer(self, key_id: str | None) -> "_Signer | None":
        """The published key with this id, the only one where a token names none. Raises CheckFailedError."""
        async with self._reading:
            now = time.monotonic()
            unknown = key_id is not None and key_id not in self._keys
            pause_s = JWKS_RELOAD_S if self._keys else FAILED_S
            if (now - self._read_s > JWKS_REFRESH_S or unknown) and now - self._tried_s > pause_s:
                await self._read_keys(now)
        if not self._keys:
            raise CheckFailedError(f"the keys of {_place(self._issuer)} could not be read")
        if key_id is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(key_id)

    async def _read_keys(self, now: float) -> None:
        self._tried_s = now
        try:
            place = f"{self._issuer.rstrip('/')}/.well-known/openid-configuration"
            found = await self._client.object(place)
            if found.get("issuer") != self._issuer:
                raise CheckFailedError(f"{_place(place)} is of another issuer: {str(found.get('issuer'))[:200]!r}")
            published = (await self._client.object(str(found.get("jwks_uri")))).get("keys")
            keys = _signers(self._jwt, published if isinstance(published, list) else [])
            if not keys:
                raise CheckFailedError(f"{_place(place)} publishes no key that can be used")
        except (CheckFailedError, aiohttp.ClientError, OSError, ValueError) as error:
            if now - self._read_s > JWKS_STALE_S:
                raise
            log.warning("the issuer's keys could not be read again; those read before stay in use: %s", error)
        else:
            self._keys, self._read_s = keys, now


@dataclass(frozen=True, slots=True)
class _Signer:
    """A published key. alg: the only algorithm that it may be used with; "" if it names none."""

    key: Any
    alg: str


def _signers(jwt: Any, published: list[Any]) -> dict[str | None, _Signer]:
    """The public keys of a JWKS document by id. Symmetric keys, and those for encryption, are left out."""
    found = {}
    for entry in published:
        if not isinstance(entry, dict) or entry.get("kty") not in ("RSA", "EC", "OKP") or entry.get("use") == "enc":
            continue
        with suppress(jwt.PyJWTError):
            found[entry.get("kid")] = _Signer(jwt.PyJWK(entry).key, str(entry.get("alg") or ""))
    return found


def open_checked_keys(settings: RouterSettings) -> CheckedKeys:
    """What checks keys by the settings. Raises ConfigError for an invalid URL, and for missing packages."""
    checker: KeyChecker
    if settings.auth_url:
        checker = AuthUrl(settings.auth_url)
    else:
        checker = OidcTokens(settings.oidc_issuer, settings.oidc_audience, settings.oidc_tenant_claim)
    return CheckedKeys(checker, timeout_s=settings.auth_timeout_secs, cache_s=settings.auth_cache_secs)
