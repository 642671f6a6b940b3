"""What a client predicts of an answer saves steps and changes nothing."""

import asyncio
import json

import pytest

from tokenyard import LLM
from tokenyard.config import DEMO_MODEL
from tokenyard.local import LocalApi

pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "model.safetensors").is_file(), reason="there is no demo model")
FOOD = {"enum": ["berries and mice"]}
SCHEMA = {"type": "object", "properties": {"favourite_food_of_it": FOOD}, "required": ["favourite_food_of_it"]}
ANIMAL = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA | {"additionalProperties": False}}}


def test_an_answer_is_the_same_with_a_prediction_and_takes_fewer_steps():
    async def ask(api, **more):
        body = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 50, "seed": 5, **more}
        status, answer = await api.whole("POST", "/v1/chat/completions", body)
        assert status == 200, answer
        answer = json.loads(answer)
        return answer["choices"][0]["message"]["content"], answer["usage"].get("completion_tokens_details")

    async def asks(api, predicted):
        plain = await ask(api)
        text = {"type": "content", "content": plain[0] if predicted else "something else, of which nothing is right"}
        return plain, await ask(api, prediction=text), await ask(api, response_format=ANIMAL, prediction=text)

    # By a profile, so that a busy machine does not decide what is verified.
    drafting = {"speculative_algorithm": "NGRAM", "cost_profile": "cpu/demo"}
    with LLM(DEMO_MODEL, device="cpu", dtype="float32", **drafting) as llm:
        api = LocalApi(llm)
        plain, right, formed = asyncio.run(asks(api, True))
        _, wrong, _ = asyncio.run(asks(api, False))
    with LLM(DEMO_MODEL, device="cpu", dtype="float32") as llm:
        unsped, idle, other_formed = asyncio.run(asks(LocalApi(llm), True))
    assert plain[0] == right[0] == wrong[0] == unsped[0]
    assert right[1]["accepted_prediction_tokens"] > 30 > wrong[1]["accepted_prediction_tokens"]
    assert idle[1] == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    # The schema forces most of its tokens, which are drafts without any prediction.
    assert formed[0] == other_formed[0]
    assert json.loads(formed[0]) == {"favourite_food_of_it": "berries and mice"}
    assert formed[1]["accepted_prediction_tokens"] > 5
