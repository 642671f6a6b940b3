"""The LoRA adapters of an engine by name: loading and unloading them while it runs, and what a name means."""

import asyncio
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tokenyard.base import ConfigError, InvalidRequestError
from tokenyard.engine.frontend.data_parallel_controller import DataParallelController
from tokenyard.engine.frontend.scheduler_client import SchedulerClient
from tokenyard.kv_layout.model_digest import adapter_digest

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
LOAD_TIMEOUT_S = 600.0
UNLOAD_TIMEOUT_S = 24 * 3600.0
"""Timeout of an unload, which waits for the adapter's requests to end."""


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A LoRA adapter.

    name: the name that requests use.
    key: name and digest of the files (`Request.lora`), so that KV of other weights under the same name is never used.
    folder: the folder of its files.
    """

    name: str
    key: str
    folder: str


class LoraRegistry:
    """Used from one event loop. It is off until `start`; schedulers that join `ranks` are told of the adapters."""

    def __init__(self, ranks: DataParallelController) -> None:
        self._ranks = ranks
        ranks.on_join.append(self._load_into)
        self._enabled = False
        self._loaded: dict[str, LoraAdapter] = {}
        self._unloading: dict[str, LoraAdapter] = {}
        self._loading: set[str] = set()

    @property
    def loaded(self) -> Mapping[str, LoraAdapter]:
        """The adapters that requests may name, by name."""
        return self._loaded

    def key_of(self, name: str) -> str:
        """What the engine calls the adapter of this name, "" for "". Raises InvalidRequestError if there is none."""
        if not name:
            return ""
        found = self._loaded.get(name)
        if found is None:
            raise InvalidRequestError(f"no adapter {name!r} is loaded", param="lora_path", code="model_not_found")
        return found.key

    async def load(self, name: str, folder: str) -> LoraAdapter:
        """Load the adapter in a folder, in all schedulers or in none; other requests go on meanwhile.

        Raises ConfigError for a name that is taken or makes no sense, and for an adapter that cannot be served.
        """
        self._check(name)
        self._loading.add(name)
        try:
            adapter = LoraAdapter(name, f"{name}#{await asyncio.to_thread(adapter_digest, folder)}", folder)
            try:
                await self._ranks.call("load_adapter", None, LOAD_TIMEOUT_S, adapter=adapter.key, folder=adapter.folder)
            except BaseException:
                # Another scheduler may have read it.
                for client in self._ranks.clients:
                    client.order("unload_adapter", adapter=adapter.key)
                raise
            self._loaded[name] = adapter
        finally:
            self._loading.discard(name)
        return adapter

    async def start(self, folders: Mapping[str, str], *, enabled: bool) -> None:
        """Say whether there may be adapters; load the first ones, by name. Raises what `load` raises."""
        self._enabled = enabled
        for name, folder in folders.items():
            await self.load(name, folder)

    async def unload(self, name: str) -> None:
        """Take no further requests for an adapter, and free it once those that it has have ended.

        Raises InvalidRequestError if there is none of that name.
        """
        self.key_of(name)
        adapter = self._unloading[name] = self._loaded.pop(name)
        try:
            await self._ranks.call("unload_adapter", None, UNLOAD_TIMEOUT_S, adapter=adapter.key)
        finally:
            del self._unloading[name]

    def _load_into(self, client: SchedulerClient) -> None:
        """A scheduler process runs that knows no adapters yet."""
        for adapter in (*self._loaded.values(), *self._unloading.values()):
            client.order("load_adapter", adapter=adapter.key, folder=adapter.folder, if_room=True)

    def _check(self, name: str) -> None:
        if not self._enabled:
            raise ConfigError("adapters are off here; start the server with --enable-lora")
        check_name(name)
        if name in self._loaded or name in self._loading:
            raise ConfigError(f"an adapter {name!r} is loaded already; unload it first, or choose another name")
        if name in self._unloading:
            raise ConfigError(f"the adapter {name!r} is being unloaded: requests with it are still running")


def check_name(name: str) -> None:
    """Raise ConfigError for what cannot be the name of an adapter."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{name[:130]!r} cannot be the name of an adapter; use up to 128 letters, digits, dots, hyphens and"
            " underscores"
        )


def parse_adapters(words: Iterable[str]) -> dict[str, str]:
    """Folders of adapters by name, from words NAME=FOLDER, or FOLDER for the name of its last part.

    Raises ConfigError for names that make no sense or come twice.
    """
    found: dict[str, str] = {}
    for word in words:
        name, equals, folder = word.partition("=")
        if not equals:
            name, folder = word.rstrip("/").rpartition("/")[2], word
        check_name(name)
        if name in found:
            raise ConfigError(f"--lora-paths names {name!r} twice")
        found[name] = folder
    return found
