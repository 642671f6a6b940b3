"""The demo model, served for real on the CPU."""

import httpx2
import pytest

from tests.e2e.servers import Server
from tokenyard.config import DEMO_MODEL

torch = pytest.importorskip("torch")
openai = pytest.importorskip("openai")

pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "model.safetensors").is_file(), reason="the demo model is not there")
HELLO = [{"role": "user", "content": "Tell me a story about a cat."}]


@pytest.fixture(scope="module")
def client():
    server = Server("--device", "cpu", "--threads", "1", "--max-total-tokens", "4k")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
    assert server.close() == 0


def test_greedy_text_is_the_same_whole_streamed_and_cached(client):
    options = {"model": "tokenyard-demo", "messages": HELLO, "max_tokens": 24, "temperature": 0}
    first = client.chat.completions.create(**options)
    text = first.choices[0].message.content
    assert len(text.split()) > 3
    again = client.chat.completions.create(**options)
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert again.choices[0].message.content == text
    chunks = client.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == text


def test_scores_of_a_text_agree_with_its_generation(client):
    """Log-probabilities given while generating are those that scoring the same tokens gives."""
    options = {"model": "tokenyard-demo", "temperature": 0, "logprobs": 1}
    made = client.completions.create(
        **options, prompt=[0, 65, 66, 67], max_tokens=8, extra_body={"return_token_ids": True}
    )
    ids = [0, 65, 66, 67, *made.choices[0].token_ids]
    scored = client.completions.create(**options, prompt=ids, echo=True, max_tokens=1)
    expected = made.choices[0].logprobs.token_logprobs
    assert scored.choices[0].logprobs.token_logprobs[4:-1] == pytest.approx(expected, abs=0.1)


@pytest.mark.slow
def test_sampling_with_a_seed_repeats(client):
    options = {"model": "tokenyard-demo", "messages": HELLO, "max_tokens": 16, "temperature": 1.0, "seed": 11}
    texts = {client.chat.completions.create(**options).choices[0].message.content for _ in range(2)}
    assert len(texts) == 1


@pytest.mark.slow
def test_policies_that_need_step_times_run_without_a_profile():
    server = Server("--device", "cpu", "--threads", "1", "--max-total-tokens", "4k", "--schedule-policy", "slo")
    body = {"prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True, "slo": {"ttft_ms": 5000}}
    try:
        assert httpx2.post(f"{server.url}/v1/completions", json=body).json()["usage"]["completion_tokens"] == 40
    finally:
        assert server.close() == 0
