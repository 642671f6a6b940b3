"""A whole engine of real processes over the mock executor."""

import asyncio
from contextlib import AsyncExitStack, contextmanager

from tests.engine.text_helpers import DEMO_TOKENIZER
from tokenyard.engine.processes.engine_config import EngineConfig
from tokenyard.executor.mock import load_executor

DEMO_FOLDER = DEMO_TOKENIZER.parent


def mock_config(*, skip_tokenizer=False, overlap=True, **options):
    return EngineConfig(
        model_path=str(DEMO_FOLDER),
        executor="mock",
        executor_options={"step_ms": 1.0, "max_total_tokens": 4096, "check_kv": True, **options},
        skip_tokenizer_init=skip_tokenizer,
        overlap=overlap,
        log_level="warning",
    )


@contextmanager
def one_for_many(engine):
    """Start an engine; `work(manager)` runs in it, again and again, where it is left as it was found."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        manager = runner.run(stack.enter_async_context(engine))
        try:
            yield lambda work: runner.run(asyncio.wait_for(work(manager), 60))
        finally:
            runner.run(stack.aclose())


def watched_mock(**options):
    """A mock executor that checks every KV page that it reads."""
    return load_executor(check_kv=True, **options)
