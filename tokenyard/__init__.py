"""Tokenyard: an LLM serving engine whose scheduler also runs the simulator."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenyard.base import SamplingParams
    from tokenyard.offline import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import what is asked for only then, so that `import tokenyard` stays light."""
    if name == "LLM":
        from tokenyard.offline import LLM

        return LLM
    if name == "SamplingParams":
        from tokenyard.base import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
