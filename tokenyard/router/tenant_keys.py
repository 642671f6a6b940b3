"""The keys of tenants: those of a file, and those that something else checks."""

import hmac
from typing import TYPE_CHECKING

from tokenyard.router.api_keys import KeyFile
from tokenyard.router.router_settings import RouterSettings
from tokenyard.routing.tenant_limits import KeyUsage

if TYPE_CHECKING:
    from tokenyard.router.checked_keys import CheckedKeys


class TenantKeys:
    """A key of the file is not checked elsewhere."""

    def __init__(self, settings: RouterSettings) -> None:
        """Raises ConfigError for a file or a setting that is wrong, and for packages that are missing."""
        self._own = [key.encode() for key in (settings.api_key, settings.admin_api_key) if key]
        self._file = KeyFile(settings.keys_file) if settings.keys_file else None
        self._checked: CheckedKeys | None = None
        if settings.auth_url or settings.oidc_issuer:
            # The import costs the start of a router that checks no keys.
            from tokenyard.router.checked_keys import open_checked_keys

            self._checked = open_checked_keys(settings)

    def refresh(self) -> None:
        """Read the file again if it changed."""
        if self._file is not None:
            self._file.refresh()

    def pending(self, key: bytes) -> bool:
        """Whether a key must be checked (`check`) before `find` knows it."""
        return self._checked is not None and self._is_foreign(key) and self._checked.pending(key)

    def begin(self, key: bytes) -> None:
        """Begin to check a key that is pending."""
        assert self._checked is not None
        self._checked.begin(key)

    async def check(self, key: bytes) -> None:
        """Check a key if it is pending."""
        if self.pending(key):
            assert self._checked is not None
            await self._checked.check(key)

    def find(self, key: bytes) -> KeyUsage | None:
        """What belongs to a key, None for an unknown one. Raises RouterError for one that a check refuses."""
        found = None if self._file is None else self._file.find(key)
        if found is None and self._checked is not None and self._is_foreign(key):
            return self._checked.find(key)
        return found

    async def close(self) -> None:
        """End all checks."""
        if self._checked is not None:
            await self._checked.close()

    def _is_foreign(self, key: bytes) -> bool:
        """Whether a key is neither the router's nor one of the file."""
        if not key or any(hmac.compare_digest(key, own) for own in self._own):
            return False
        return self._file is None or self._file.find(key) is None


def open_tenant_keys(settings: RouterSettings) -> TenantKeys | None:
    """The keys of tenants, None without any. Raises what TenantKeys raises."""
    return TenantKeys(settings) if settings.has_tenant_keys else None
