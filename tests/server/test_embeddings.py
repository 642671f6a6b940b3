"""Vectors and reranking over the fake engine, whose vector counts the first four words."""

import base64
import math

import numpy as np
import pytest


def vectors(server, **body):
    answer = server.client.post("/v1/embeddings", json=body).json()
    return [entry["embedding"] for entry in answer["data"]]


def test_a_vector_for_each_text_of_length_one(server):
    found = vectors(server, input=["hello hello", "hello world"])
    assert found[0] == [1, 0, 0, 0]
    assert found[1] == pytest.approx([math.sqrt(0.5), math.sqrt(0.5), 0, 0])
    specs = server.manager.specs
    assert [spec.pooling for spec in specs] == ["last", "last"]
    assert all(spec.sampling.max_new_tokens == 0 for spec in specs)


def test_base64_is_the_same_vector_and_dimensions_make_it_shorter(server):
    (text,) = vectors(server, input=[1, 2, 2], encoding_format="base64")
    assert np.frombuffer(base64.b64decode(text), np.float32).tolist() == pytest.approx([0.4472136, 0.8944272, 0, 0])
    assert vectors(server, input="hello the quick", dimensions=2, pooling="mean")[0] == [1, 0]
    assert server.manager.specs[-1].pooling == "mean"


def test_usage_counts_the_tokens_of_all_texts(server):
    answer = server.client.post("/v1/embeddings", json={"input": ["hello", "the fox"]}).json()
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


def test_reranking_puts_the_nearest_first(server):
    body = {"query": "hello the", "documents": ["world", {"text": "hello the"}, "hello"], "top_n": 2}
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        answer = server.client.post(path, json=body | {"return_documents": True}).json()
        assert [result["index"] for result in answer["results"]] == [1, 2]
        assert answer["results"][0]["relevance_score"] == pytest.approx(1.0)
        assert answer["results"][0]["document"] == {"text": "hello the"}


def test_scores_of_one_text_and_of_pairs(server):
    one = server.client.post("/score", json={"text_1": "hello", "text_2": ["hello", "world"]}).json()
    assert [(entry["index"], entry["score"]) for entry in one["data"]] == [(0, 1.0), (1, 0.0)]
    assert one["usage"]["total_tokens"] == 3
    pairs = {"text_1": ["hello", "world"], "text_2": ["world", "world"]}
    assert [entry["score"] for entry in server.client.post("/score", json=pairs).json()["data"]] == [0.0, 1.0]


def test_ollamas_shape(server):
    answer = server.client.post("/api/embed", json={"model": "fake:latest", "input": ["hello", "world"]}).json()
    assert answer["embeddings"] == [[1, 0, 0, 0], [0, 1, 0, 0]]
    assert answer["prompt_eval_count"] == 2


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": "hello", "pooling": "cls"}, "pooling"),
        ("/v1/embeddings", {"input": "hello", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "hello", "dimensions": 5}, "dimensions"),
        ("/v1/rerank", {"query": "hello", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "hello", "documents": [3]}, "documents"),
        ("/v1/rerank", {"query": "hello", "documents": ["hello"], "top_n": 0}, "top_n"),
        ("/score", {"text_1": ["hello", "world"], "text_2": "hello"}, "text_1"),
        ("/score", {"text_1": [], "text_2": []}, "text_1"),
    ],
)
def test_wrong_requests_get_a_clear_400(server, path, body, param):
    answer = server.client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
