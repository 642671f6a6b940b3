"""A whole engine of real processes over the mock executor."""

from tests.engine.text_helpers import DEMO_TOKENIZER
from tokenyard.engine.config import EngineConfig

DEMO_FOLDER = DEMO_TOKENIZER.parent


def mock_config(*, skip_tokenizer=False, overlap=True, **options):
    return EngineConfig(
        model_path=str(DEMO_FOLDER),
        executor="mock",
        executor_options={"step_ms": 1.0, "max_total_tokens": 4096, **options},
        skip_tokenizer_init=skip_tokenizer,
        overlap=overlap,
        log_level="warning",
    )
