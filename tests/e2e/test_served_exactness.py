"""Greedy tokens of a real server are those of transformers, with none of the schedule settings and with all.

Every combination of them is held in process (tests/matrix/test_exactness.py), by the same scheduler.
"""

import asyncio

import aiohttp
import pytest

from tests.e2e.servers import Server
from tests.executor.tiny_models import greedy, judge
from tests.matrix.test_exactness import prompts

TOKENS = 8
NONE = ("--max-total-tokens", "4096")
ALL = (
    *("--page-size", "16", "--chunked-prefill-size", "16", "--enable-mixed-chunk", "--enable-overlap-schedule"),
    *("--disable-radix-cache", "--max-total-tokens", "160", "--schedule-conservativeness", "0.01"),
)


async def ask(session, url, prompt):
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    async with session.post(f"{url}/generate", json={"input_ids": prompt, "sampling_params": sampling}) as answer:
        found = await answer.json()
        assert answer.status == 200, found
        return found["output_ids"]


async def ask_all(url):
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return await asyncio.gather(*(ask(session, url, prompt) for prompt in prompts()))


@pytest.mark.parametrize(
    ("case", "flags"), [("llama-odd", NONE), pytest.param("mistral-window", ALL, marks=pytest.mark.slow)]
)
def test_a_served_answer_is_that_of_transformers(tmp_path, case, flags):
    judge(case).save_pretrained(tmp_path)
    more = ("--dtype", "float32", "--device", "cpu", "--skip-tokenizer-init", "--max-running-requests", "32")
    running = Server(str(tmp_path), *more, *flags)
    try:
        answers = asyncio.run(ask_all(running.url))
    finally:
        assert running.close() == 0
    for prompt, answer in zip(prompts(), answers, strict=True):
        assert answer == greedy(case, prompt, TOKENS, answer)
