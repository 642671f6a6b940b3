"""The weights of an engine: changing them in all its schedulers or in none, and restoring them in one that restarts."""

import asyncio
import logging
from collections.abc import AsyncIterator
from collections.abc import Set as Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenyard.base import OverloadedError, Pause, TokenyardError, WeightSource
from tokenyard.engine.frontend.data_parallel_controller import DataParallelController
from tokenyard.engine.frontend.scheduler_client import SchedulerClient
from tokenyard.engine.frontend.weight_files import WeightFiles

logger = logging.getLogger(__name__)

MEMORY_TAGS = ("kv_cache", "weights")
"""Kinds of memory that can be released."""

PREPARE_TIMEOUT_S = 3600.0
GROUP_TIMEOUT_S = 360.0
USE_TIMEOUT_S = 600.0
"""Timeout of a swap, which waits for the steps in flight."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """New weights.

    source: where they are.
    version: the name that answers have for them; "" for the number of the update.
    flush: whether KV of other weights is evicted.
    """

    source: WeightSource
    version: str = ""
    flush: bool = True


class WeightUpdates:
    """Used from one event loop. Updates take place one after the other.

    joint_steps: whether ranks compute each step together (DP attention), so that all must change between the same two.
    lock: held while weights are swapped, so that no pause begins or ends meanwhile.
    files: where tensors are kept that were sent.
    version: of the weights in use, "" for those that the engine started with.
    """

    def __init__(self, ranks: DataParallelController, *, joint_steps: bool = False) -> None:
        self._joint_steps = joint_steps
        self.lock = asyncio.Lock()
        self._updating = asyncio.Lock()
        self.version = ""
        self.files = WeightFiles()
        self.released: set[str] = set()
        """Kinds of memory (MEMORY_TAGS) that are given back. Meanwhile no step is planned."""

        self._staged: list[Path] = []
        self._received = False
        self._ranks = ranks
        self._count = 0
        self._source = WeightSource()
        self._behind = False
        """Whether a process was started while weights were released, and would resume with those of its start."""

        self._restoring: asyncio.Task[None] | None = None
        ranks.on_join.append(self._restore)

    async def update(self, update: WeightUpdate) -> str:
        """Change the weights of all schedulers, or of none; returns the version. Requests go on meanwhile.

        Raises ConfigError for weights that do not fit or are damaged, and what the schedulers' calls raise.
        """
        async with self._updating:
            return await self._update(update)

    def stage(self, path: Path) -> int:
        """Keep a file of tensors until `use_staged`; returns how many are kept."""
        self._staged.append(path)
        return len(self._staged)

    async def use_staged(self, version: str = "", *, flush: bool = True) -> str:
        """Put the tensors of all staged files in use at once, or of none; returns the version. The files are removed
        in any case. Raises what `update` raises.
        """
        async with self._updating:
            staged, self._staged = self._staged, []
            received, self._received = self._received, False
            if not staged and not received:
                return self.version
            try:
                source = WeightSource(files=tuple(map(str, staged)), received=received)
                return await self._update(WeightUpdate(source, version, flush))
            finally:
                # Each rank has mapped what it needs of them.
                for path in staged:
                    path.unlink(missing_ok=True)

    async def release(self, tags: Collection[str]) -> None:
        """Have all ranks give memory back. Raises ConfigError while requests are open, and for what cannot be given
        back; then nothing is released.
        """
        async with self._updating, self._all_held():
            try:
                await self._ranks.call("release_memory", None, tags=sorted(tags))
            except BaseException:
                with suppress(TokenyardError):
                    await self._ranks.call("resume_memory", Any, PREPARE_TIMEOUT_S, tags=sorted(tags - self.released))
                raise
            self.released |= set(tags)
            self._ranks.balancer.flushed()

    async def resume(self, tags: Collection[str]) -> None:
        """Have all ranks take memory again. Raises ConfigError if weights cannot be read; they then stay released."""
        async with self._updating, self._all_held():
            if self._behind and "weights" in tags:
                await self._update(WeightUpdate(self._source, self.version))
            await self._ranks.call("resume_memory", Any, PREPARE_TIMEOUT_S, tags=sorted(tags & self.released))
            self.released -= set(tags)
            self._stay_paused()

    async def join_group(
        self, group: str, address: str, port: int, *, rank_offset: int, size: int, backend: str
    ) -> None:
        """Have all processes that have weights join a trainer's group, the first one as rank `rank_offset`. Raises
        ConfigError.
        """
        place = {"group": group, "address": address, "port": port, "rank_offset": rank_offset}
        await self._ranks.call("join_weight_group", None, GROUP_TIMEOUT_S, **place, size=size, backend=backend)

    async def receive(self, group: str, tensors: list[tuple[str, str, list[int]]]) -> None:
        """Have all ranks receive tensors, which `use_staged` puts in use. Raises ConfigError; then what was received
        before is dropped too. No update takes place meanwhile.
        """
        async with self._updating:
            try:
                await self._ranks.call("receive_weights", None, GROUP_TIMEOUT_S, group=group, tensors=tensors)
            except BaseException:
                self._received = False
                await self._drop()
                raise
            self._received = True

    async def leave_group(self, group: str) -> None:
        """Have all ranks leave a group. Raises ConfigError if it is not there."""
        await self._ranks.call("leave_weight_group", None, GROUP_TIMEOUT_S, group=group)

    def close(self) -> None:
        """Remove files that are kept."""
        self.files.close()

    async def _update(self, update: WeightUpdate) -> str:
        source, ranks = update.source, self._processes
        given = {"folder": source.folder, "files": list(source.files), "received": source.received}
        given |= {"draft_folder": source.draft_folder}
        try:
            digests = await self._ranks.call("prepare_weights", str, PREPARE_TIMEOUT_S, **given)
        except BaseException:
            await self._drop()
            raise
        if len(set(digests)) > 1:
            await self._drop()
            raise TokenyardError("the ranks of the engine read different weights; the files changed meanwhile")
        if self._processes != ranks:
            # It has prepared nothing, and goes on with the weights in use.
            await self._drop()
            raise TokenyardError("a rank of the engine has restarted meanwhile; send the weights again")
        self._count += 1
        self.version = version = update.version or str(self._count)
        # Tensors that were sent are gone, so that only a folder can be read again.
        self._source = replace(source, files=(), received=False) if source.folder else WeightSource()
        self._behind = False
        self.released.discard("weights")
        async with self.lock, self._all_held():
            await self._ranks.call("use_weights", None, USE_TIMEOUT_S, version=version, flush=update.flush)
        self._stay_paused()
        # What the balancer expects to be cached is KV of the old weights.
        self._ranks.balancer.flushed()
        return version

    @asynccontextmanager
    async def _all_held(self) -> AsyncIterator[None]:
        """Have no rank plan a step meanwhile, where ranks compute steps together."""
        if not self._joint_steps:
            yield
            return
        if len(self._ranks.clients) < self._ranks.size:
            raise OverloadedError("a rank of the engine is being started again; try again soon", code="restarting")
        try:
            await self._ranks.call("hold_steps", None, USE_TIMEOUT_S)
            yield
        finally:
            with suppress(TokenyardError):
                await asyncio.shield(self._ranks.call("end_hold", None))

    def _stay_paused(self) -> None:
        """Renew a pause that came while ranks held back by themselves, which go on by themselves too: without memory,
        or after a restart without the weights of the engine.
        """
        if self._ranks.paused:
            self._ranks.pause(Pause())

    @property
    def _processes(self) -> list[int]:
        """The numbers of the processes of all ranks that run."""
        return [client.source for client in self._ranks.clients]

    async def _drop(self) -> None:
        """Have all schedulers free what they have prepared, as one of them could not."""
        with suppress(TokenyardError):
            await asyncio.shield(self._ranks.call("drop_weights", None))

    def _restore(self, client: SchedulerClient) -> None:
        """A scheduler process runs that has all its memory and the weights that the engine started with."""
        if self.released:
            client.order("release_memory", tags=sorted(self.released))
        source = self._source
        if not self._count:
            return
        if not source.folder:
            client.order("await_weights")
            logger.error(
                "rank %d has restarted and answers nothing until it has weights: those of version %s were sent as "
                "tensors; send all of them again",
                *(client.rank, self.version),
            )
        elif "weights" in self.released:
            self._behind = True
        elif self._joint_steps:
            client.order("await_weights")
            if len(self._ranks.clients) == self._ranks.size:
                self._restoring = asyncio.create_task(self._restore_all())
        else:
            given = {"folder": source.folder, "draft_folder": source.draft_folder}
            client.order("restore_weights", version=self.version, **given)

    async def _restore_all(self) -> None:
        """Have all ranks, which have restarted together, use the weights of the engine from the same step on."""
        try:
            async with self._updating:
                await self._update(WeightUpdate(self._source, self.version))
        except TokenyardError as error:
            logger.error("no step is planned until weights are sent again: %s", error.message)
