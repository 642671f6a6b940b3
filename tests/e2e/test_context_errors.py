"""What does not fit the context, in the words that clients of each API read."""

import asyncio
import json
import re

import pytest

from tokenyard import LLM
from tokenyard.config import DEMO_MODEL
from tokenyard.local import LocalApi

pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "model.safetensors").is_file(), reason="there is no demo model")
OVERFLOW = re.compile(r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)")
TOO_LONG = re.compile(r"prompt is too long: (\d+) tokens > (\d+) maximum")
MAXIMUM = re.compile(r"maximum context length is (\d+) tokens")


@pytest.fixture(scope="module")
def api():
    with LLM(DEMO_MODEL, device="cpu") as llm:
        yield LocalApi(llm)


def refused(api, path: str, **body) -> dict:
    status, answer = asyncio.run(api.whole("POST", path, body))
    assert status == 400, answer
    return json.loads(answer)["error"]


def chat(words: int) -> list[dict]:
    return [{"role": "user", "content": "dog " * words}]


def test_anthropics_words_let_a_client_ask_for_less(api):
    error = refused(api, "/v1/messages", messages=chat(10), max_tokens=32_000)
    assert error["type"] == "invalid_request_error"
    prompt, answer, most = map(int, OVERFLOW.search(error["message"]).groups())
    assert answer == 32_000
    assert prompt + answer > most
    body = {"messages": chat(10), "max_tokens": most - prompt, "stop_sequences": ["."]}
    assert asyncio.run(api.whole("POST", "/v1/messages", body))[0] == 200


@pytest.mark.parametrize("words", [1100, 20_000, 200_000])
def test_anthropics_words_say_that_a_session_must_be_compacted(api, words):
    prompt, most = map(
        int, TOO_LONG.search(refused(api, "/v1/messages", messages=chat(words), max_tokens=9)["message"]).groups()
    )
    assert prompt > most > 1000


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": chat(10), "max_tokens": 32_000}),
        ("/v1/chat/completions", {"messages": chat(3000)}),
        ("/v1/completions", {"prompt": "dog " * 3000}),
        ("/v1/completions", {"prompt": "dog " * 90_000}),
        ("/v1/responses", {"input": "dog " * 10, "max_output_tokens": 32_000}),
    ],
)
def test_openais_words_and_code(api, path, fields):
    error = refused(api, path, **fields)
    assert error["code"] == "context_length_exceeded"
    assert int(MAXIMUM.search(error["message"])[1]) == 1024
