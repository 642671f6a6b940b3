"""One call that brings an engine up and takes it down again."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tokenizers import Tokenizer

from tokenyard.engine.chat_template import ChatTemplate, load_chat_template
from tokenyard.engine.config import EngineConfig
from tokenyard.engine.detokenizer import load_tokenizer
from tokenyard.engine.ipc import SocketDirectory
from tokenyard.engine.supervisor import Supervisor
from tokenyard.engine.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)


@asynccontextmanager
async def running_engine(
    config: EngineConfig, on_death: Callable[[str], None] = lambda reason: None
) -> AsyncIterator[TokenizerManager]:
    """Start an engine's processes and yield their front when they are ready; stop them at the end.

    `on_death` hears the reason if the engine dies in between; open requests have ended with it by then. Raises
    ConfigError for a tokenizer or template that cannot be loaded, EngineDeadError for a process that cannot start.
    """
    tokenizer, template = load_text_side(config)

    with SocketDirectory() as sockets:
        managers: list[TokenizerManager] = []

        def died(reason: str) -> None:
            logger.error("the engine stopped: %s", reason)
            for manager in managers:
                manager.engine_died(reason)
            on_death(reason)

        supervisor = Supervisor(config, sockets, died)
        info = await supervisor.start()
        manager = TokenizerManager(info, tokenizer, template, sockets.endpoints)
        managers.append(manager)
        try:
            yield manager
        finally:
            await manager.close()
            await supervisor.stop()


def load_text_side(config: EngineConfig) -> tuple[Tokenizer | None, ChatTemplate]:
    """Load the tokenizer and chat template, or neither with `skip_tokenizer_init`. Raises ConfigError."""
    if config.skip_tokenizer_init:
        return None, ChatTemplate({}, {})
    path = Path(config.tokenizer_path or config.model_path)
    folder = path if path.is_dir() else path.parent
    return load_tokenizer(str(path)), load_chat_template(folder, config.chat_template)
