"""Tokenyard: an LLM serving engine whose scheduler also runs the simulator."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenyard.base.version import __version__
    from tokenyard.offline import LLM, SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]

_HOMES = {"LLM": "tokenyard.offline", "SamplingParams": "tokenyard.offline", "__version__": "tokenyard.base.version"}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import tokenyard` loads none of its subpackages."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
