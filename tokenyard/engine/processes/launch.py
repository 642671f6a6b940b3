"""One call that brings an engine up and takes it down again."""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tokenizers import Tokenizer

from tokenyard.base import ExecutorInfo
from tokenyard.engine.detokenizer.assembler import TextAssembler
from tokenyard.engine.frontend.paused_requests import PausedRequests
from tokenyard.engine.frontend.tokenizer_manager import TokenizerManager
from tokenyard.engine.processes.engine_config import EngineConfig
from tokenyard.engine.processes.ipc import SocketDirectory
from tokenyard.engine.processes.link import SocketLink
from tokenyard.engine.processes.supervisor import Supervisor
from tokenyard.engine.scheduler_process.health.liveness import HEARTBEAT_INTERVAL_S
from tokenyard.engine.text.chat_template import ChatTemplate, load_chat_template
from tokenyard.engine.text.tokenizer_files import load_tokenizer
from tokenyard.routing.balance import RankBalancer

logger = logging.getLogger(__name__)

SILENCE_CHECK_INTERVAL_S = 0.5
SILENT_TIMES = 3
SILENCE_GRACE_S = 2.0
"""Seconds that the watchdog inside the scheduler's process, which can report the cause, gets before a kill."""

DETOKENIZER_TIMEOUT_S = 10.0
"""Longest silence of the detokenizer, whose steps are short for any model; less with a shorter watchdog."""

DETOKENIZER_QUIET_S = 2.5 * HEARTBEAT_INTERVAL_S
"""After this silence of the detokenizer the state of schedulers is unknown: it forwards their heartbeats."""


@asynccontextmanager
async def running_engine(
    config: EngineConfig, on_engine_dead: Callable[[str], None] = lambda reason: None
) -> AsyncIterator[TokenizerManager]:
    """Start an engine's processes and yield their front when they are ready; stop them at the end.

    `on_engine_dead` gets the reason if the engine dies in between; open requests have ended with it by then. Raises
    ConfigError for a tokenizer or template that cannot be loaded, EngineDeadError for a process that cannot start.
    """
    tokenizer, template = load_tokenizer_and_template(config)

    with SocketDirectory() as sockets:
        supervisor = Supervisor(config, sockets)
        info = await supervisor.start()
        _warn_of_unknown_tokens(tokenizer, info)
        link = SocketLink(sockets.endpoints)
        assembler = TextAssembler(None) if config.skip_tokenizer_init else None
        pool_tokens, on_disk = info.num_pages * info.page_size, config.kv_store.disk_tokens(info.kv_bytes_per_token)
        balancer = RankBalancer(config.load_balance_method, config.ranks, pool_tokens, config.scheduler, on_disk)
        manager = TokenizerManager(
            *(info, tokenizer, template, link),
            assembler=assembler,
            on_engine_dead=on_engine_dead,
            on_detokenizer_silent=supervisor.kill_silent_detokenizer,
            balancer=balancer,
            records=open_paused_requests(config, info),
            joint_steps=config.enable_dp_attention,
        )
        link.listen(manager.outputs.receive)
        supervisor.watch(manager.failover)
        monitor = asyncio.create_task(_kill_when_silent(manager, supervisor, config.watchdog_timeout_s))
        try:
            await start_adapters(manager, config)
            yield manager
        finally:
            monitor.cancel()
            await manager.close()
            await supervisor.stop()


def open_paused_requests(config: EngineConfig, info: ExecutorInfo) -> PausedRequests | None:
    """The records of paused requests next to the KV store; None without one on disk."""
    if not (config.kv_store.enabled and config.kv_store.folder):
        return None
    # The import costs a start without a store.
    from tokenyard.engine.scheduler_process.attachments.disagg import weights_digest

    return PausedRequests(f"{config.kv_store.folder}/paused", weights_digest(config, info))


async def start_adapters(manager: TokenizerManager, config: EngineConfig) -> None:
    """Load the adapters that the settings name. Raises ConfigError for one that cannot be served."""
    await manager.adapters.start(config.adapters, enabled=config.scheduler.enable_lora)


def _warn_of_unknown_tokens(tokenizer: Tokenizer | None, info: ExecutorInfo) -> None:
    """Warn if a tokenizer has tokens that its model does not know; texts with such a token are refused."""
    if tokenizer is not None and tokenizer.get_vocab_size() > info.vocab_size:
        logger.warning(
            "the tokenizer has %d tokens, the model %d: do they belong together?",
            tokenizer.get_vocab_size(),
            info.vocab_size,
        )


async def _kill_when_silent(manager: TokenizerManager, supervisor: Supervisor, timeout_s: float) -> None:
    """Kill processes that send no heartbeats: in a process that is stalled as a whole, the watchdog is stalled too.

    The detokenizer forwards the heartbeats of schedulers, so it is checked first.
    """
    times_silent: Counter[int] = Counter()
    times_text_silent = 0
    while timeout_s:
        await asyncio.sleep(SILENCE_CHECK_INTERVAL_S)
        detokenizer_age_s = manager.outputs.detokenizer_age_s()
        # More than once, as heartbeats may wait in our own socket if this process was stalled.
        silent = min(timeout_s, DETOKENIZER_TIMEOUT_S) + SILENCE_GRACE_S < detokenizer_age_s < math.inf
        times_text_silent = times_text_silent + 1 if silent else 0
        if times_text_silent == SILENT_TIMES:
            reason = f"no heartbeat from the detokenizer for {detokenizer_age_s:.0f} s"
            logger.critical("%s (see --watchdog-timeout-s); stacks follow", reason)
            supervisor.kill_silent_detokenizer(reason)
        if DETOKENIZER_QUIET_S < detokenizer_age_s < math.inf:
            times_silent.clear()
            continue
        for client in manager.ranks.clients:
            age_s = client.age_s(time.monotonic_ns())
            silent = timeout_s + SILENCE_GRACE_S < age_s < math.inf
            times_silent[client.source] = times_silent[client.source] + 1 if silent else 0
            if times_silent[client.source] == SILENT_TIMES:
                reason = f"no heartbeat from the scheduler for {age_s:.0f} s"
                last_heartbeat = client.describe_heartbeat
                logger.critical("%s (see --watchdog-timeout-s); last heard: %s; stacks follow", reason, last_heartbeat)
                supervisor.kill_silent(client.source, reason)


def load_tokenizer_and_template(config: EngineConfig) -> tuple[Tokenizer | None, ChatTemplate]:
    """Load the tokenizer and chat template, or neither with `skip_tokenizer_init`. Raises ConfigError."""
    if config.skip_tokenizer_init:
        return None, ChatTemplate({}, {})
    path = Path(config.tokenizer_path or config.model_path)
    folder = path if path.is_dir() else path.parent
    return load_tokenizer(str(path)), load_chat_template(folder, config.chat_template)
