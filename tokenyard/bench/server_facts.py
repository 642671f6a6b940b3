"""What a running server says of itself: its model, KV pool and context length."""

import asyncio
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenyard.base import ConfigError
from tokenyard.bench.load_generator import ServerClient


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself. None where it does not."""

    model: str = "model"
    device: str = "measured"
    kv_pool_tokens: int | None = None
    context_length: int | None = None


async def read_server_facts(target: ServerClient) -> ServerFacts:
    """The facts as vLLM, SGLang and Tokenyard report them. Raises ConfigError if it is no such server."""
    listed = await target.get("/v1/models")
    try:
        model = dict(listed["data"][0])
        name = str(model["id"])
    except (LookupError, TypeError, ValueError):
        raise ConfigError(
            f"{target.base_url} lists no model under /v1/models; is it an OpenAI-compatible server?"
        ) from None
    info = await _get(target, "/get_server_info") or {}
    return ServerFacts(
        model=name,
        kv_pool_tokens=info.get("max_total_num_tokens") or pool_tokens(await target.text("/metrics")),
        context_length=model.get("max_model_len") or info.get("context_length"),
    )


@cache
def facts_of(url: str) -> ServerFacts:
    """The facts of the server at `url`, read once. Raises ConfigError if it is no such server."""

    async def read() -> ServerFacts:
        async with ServerClient(url, {}) as target:
            return await read_server_facts(target)

    return asyncio.run(read())


async def _get(target: ServerClient, path: str) -> dict[str, Any] | None:
    try:
        found = await target.get(path)
    except ConfigError:  # another kind of server may answer that path with a page
        return None
    return found if isinstance(found, dict) else None


def pool_tokens(metrics: str) -> int | None:
    """The KV pool in tokens from the /metrics of vLLM, SGLang or Tokenyard, None if it is not there."""
    found = re.search(r"^sglang:max_total_num_tokens(?:\{.*\})? ([0-9.e+]+)", metrics, re.MULTILINE)
    if found:
        return int(float(found[1])) or None
    labels = re.search(r"^vllm:cache_config_info\{(.*)\}", metrics, re.MULTILINE)
    sizes = dict(re.findall(r'(\w+)="(\d+)"', labels[1])) if labels else {}
    return int(sizes.get("block_size", 0)) * int(sizes.get("num_gpu_blocks", 0)) or None
