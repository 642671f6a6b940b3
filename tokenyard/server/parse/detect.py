"""Selects the output format of a model, by its chat template or by name."""

from collections.abc import Iterable

from tokenyard.base import ConfigError
from tokenyard.server.parse.format import OutputFormat
from tokenyard.server.parse.model_formats import FAMILIES

NAMES_ELSEWHERE = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "qwen3-thinking": "hermes",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseek-v3": "deepseek_v31",
    "deepseek-r1": "think",
    "deepseek_r1": "think",
    "glm45": "glm",
    "glm47": "glm",
    "gpt-oss": "harmony",
    "openai": "harmony",
    "openai_gptoss": "harmony",
    "kimi": "kimi_k2",
    "llama3_json": "llama3",
    "llama4_pythonic": "llama4",
    "pythonic": "llama4",
    "minimax-m2": "minimax",
    "minimax_m2": "minimax",
    "phi4_mini_json": "phi4",
    "qwen3_xml": "qwen3_coder",
    "step3": "qwen3_coder",
}
"""What SGLang and vLLM call their parsers of these formats."""


def detect(sources: Iterable[str]) -> OutputFormat | None:
    """The format whose markers occur in the sources of a model's chat templates, None for none."""
    text = "\n".join(sources)
    for family in FAMILIES.values():
        if all(mark in text for mark in family.detect):
            return family
    return None


def named(name: str) -> OutputFormat:
    """The format of this name. Raises ConfigError for an unknown one."""
    name = NAMES_ELSEWHERE.get(name, name)
    if name not in FAMILIES:
        raise ConfigError(f"there is no output format {name!r}; there are {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def knows_tools(sources: Iterable[str]) -> bool:
    """Whether a model's chat templates render tools."""
    return any("tools" in source for source in sources)
