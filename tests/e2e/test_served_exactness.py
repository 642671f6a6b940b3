"""Greedy tokens of a real server are those of transformers: six servers that cover every pair of schedule settings.

The settings of server i are the bits of column i; the rows of ones are 3-subsets of {1..5}, any two of which meet and
differ, and server 0 has none, so every pair of settings appears in all four combinations.
"""

import asyncio
import itertools

import aiohttp
import pytest

from tests.e2e.servers import Server
from tests.executor.tiny_models import greedy, judge
from tests.matrix.test_exactness import prompts

TOKENS = 8
CASES = ["llama-odd", "mistral-window", "qwen2", "qwen3-layers", "llama-yarn", "qwen2-window"]
SETTINGS = [
    ("--page-size", "16"),
    ("--chunked-prefill-size", "16"),
    ("--enable-mixed-chunk",),
    ("--enable-overlap-schedule",),
    ("--disable-radix-cache",),
    ("--max-total-tokens", "160", "--schedule-conservativeness", "0.01"),
]
ONES = list(itertools.combinations(range(1, 6), 3))
ROOMY = ("--max-total-tokens", "4096")


def flags(server):
    chosen = [flag for setting, ones in zip(SETTINGS, ONES, strict=False) if server in ones for flag in setting]
    return chosen if "--max-total-tokens" in chosen else [*chosen, *ROOMY]


async def ask(session, url, prompt):
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    async with session.post(f"{url}/generate", json={"input_ids": prompt, "sampling_params": sampling}) as answer:
        found = await answer.json()
        assert answer.status == 200, found
        return found["output_ids"]


async def ask_all(url):
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return await asyncio.gather(*(ask(session, url, prompt) for prompt in prompts()))


@pytest.mark.part(6)
@pytest.mark.parametrize("server", [0, *(pytest.param(server, marks=pytest.mark.slow) for server in range(1, 6))])
def test_a_served_answer_is_that_of_transformers(tmp_path, server):
    case = CASES[server]
    judge(case).save_pretrained(tmp_path)
    more = ("--dtype", "float32", "--device", "cpu", "--skip-tokenizer-init", "--max-running-requests", "32")
    running = Server(str(tmp_path), *more, *flags(server))
    try:
        answers = asyncio.run(ask_all(running.url))
    finally:
        assert running.close() == 0
    for prompt, answer in zip(prompts(), answers, strict=True):
        assert answer == greedy(case, prompt, TOKENS, answer)
