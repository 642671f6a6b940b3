"""API keys of tenants from a file that is read again when it changes. The file holds SHA-256 digests, not keys."""

import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from tokenyard.base import ConfigError
from tokenyard.routing.tenant_limits import KeyGrant, KeyUsage

log = logging.getLogger(__name__)

DIGEST_CHARS = 64
FIELDS = frozenset(
    {
        *("tenant", "expires", "requests_per_minute", "tokens_per_minute", "max_open_requests"),
        *("max_priority", "models"),
    }
)


class KeyFile:
    """The keys of a file, by digest, and what each has used."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError if the file cannot be read or is wrong."""
        self._path = path
        self._seen = self._stamp()
        self._usage = {digest: KeyUsage(grant) for digest, grant in read_keys(path).items()}

    def refresh(self) -> None:
        """Read the file again if it changed. A wrong file is logged, and the keys stay as they are."""
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            grants = read_keys(self._path)
        except ConfigError as error:
            log.error("%s; the keys stay as they were", error.message)
            return
        old, self._usage = self._usage, {}
        for digest, grant in grants.items():
            same = digest in old and old[digest].grant == grant
            self._usage[digest] = old[digest] if same else KeyUsage(grant)
        log.info("read %d API keys of %s", len(grants), self._path)

    def find(self, key: bytes) -> KeyUsage | None:
        """What belongs to a key, None for an unknown one. The time of a lookup tells nothing of other keys."""
        return self._usage.get(sha256(key).hexdigest())

    def _stamp(self) -> tuple[int, int, int]:
        try:
            status = os.stat(self._path)
        except OSError:
            return 0, 0, 0
        return status.st_ino, status.st_mtime_ns, status.st_size


def read_keys(path: str) -> dict[str, KeyGrant]:
    """The grants of a file by the digests of their keys. Raises ConfigError that says which entry is wrong."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or "it is no YAML"
        raise ConfigError(f"--keys-file {path} cannot be read: {reason}") from None
    entries = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ConfigError(f"--keys-file {path} must have a list of keys: keys: [{{sha256: ..., tenant: ...}}]")
    grants: dict[str, KeyGrant] = {}
    for place, entry in enumerate(entries):
        where = f"--keys-file {path}, key {place + 1}"
        digest, grant = _grant(entry, where)
        if digest in grants:
            raise ConfigError(f"{where}: the same key is there twice")
        grants[digest] = grant
    return grants


def _grant(entry: Any, where: str) -> tuple[str, KeyGrant]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must have fields: {{sha256: ..., tenant: ...}}")
    rest = dict(entry)
    digest = rest.pop("sha256", None)
    if not isinstance(digest, str) or len(digest) != DIGEST_CHARS or not set(digest) <= set("0123456789abcdef"):
        raise ConfigError(f"{where}: sha256 must be the 64 hex digits of: printf %s KEY | sha256sum")
    return digest, read_grant(rest, where)


def read_grant(entry: Any, where: str) -> KeyGrant:
    """What a key allows, by fields of an entry besides its digest. Raises ConfigError, which begins with `where`."""
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must have fields: {{tenant: ...}}")
    unknown = entry.keys() - FIELDS
    if unknown:
        raise ConfigError(f"{where} has unknown fields {sorted(map(str, unknown))}; known are {sorted(FIELDS)}")
    tenant = entry.get("tenant")
    if not isinstance(tenant, str) or not tenant or not tenant.isascii() or not tenant.isprintable():
        raise ConfigError(f"{where}: tenant must be a name in printable ASCII")
    models, highest = entry.get("models") or [], entry.get("max_priority")
    if not isinstance(models, list) or not all(isinstance(name, str) for name in models):
        raise ConfigError(f"{where}: models must be a list of names")
    if highest is not None and type(highest) is not int:
        raise ConfigError(f"{where}: max_priority must be a whole number")
    return KeyGrant(
        tenant,
        _expiry(entry.get("expires"), where),
        _limit(entry, "requests_per_minute", where),
        _limit(entry, "tokens_per_minute", where),
        int(_limit(entry, "max_open_requests", where)),
        highest,
        frozenset(models),
    )


def _limit(entry: Mapping[str, Any], name: str, where: str) -> float:
    value = entry.get(name, 0)
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise ConfigError(f"{where}: {name} must be a number of 0 (no limit) or more")
    return float(value)


def _expiry(value: Any, where: str) -> float:
    """Unix time of a date or time, in UTC unless it says otherwise; 0 for none."""
    if value is None:
        return 0.0
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError:
        raise ConfigError(f"{where}: expires must be a time, such as 2027-01-31T12:00:00Z") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
