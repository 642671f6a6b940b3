"""Fields that a request leaves out come from the model's defaults, those it gives from itself."""

import pytest

DEFAULTS = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "repetition_penalty": 1.1}
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def chosen(server):
    return tuple(getattr(server.manager.specs[-1].sampling, name) for name in FIELDS)


def ask(server, path, sampling):
    if path == "/generate":
        body = {"text": "hello", "sampling_params": {**sampling, "max_new_tokens": 1}}
    elif path == "/v1/completions":
        body = {"prompt": "hello", "max_tokens": 1, **sampling}
    else:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, **sampling}
    assert server.client.post(path, json=body).status_code == 200


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_left_out_fields_come_from_the_model(start, path):
    server = start(default_sampling=DEFAULTS)
    ask(server, path, {})
    assert chosen(server) == (0.8, 0.95, 50, 0.0, 1.1)
    ask(server, path, {"temperature": 0, "top_k": 0, "min_p": 0.1, "top_p": None})
    assert chosen(server) == (0, 0.95, -1, 0.1, 1.1)


def test_without_defaults_openais_values_count(server):
    ask(server, "/v1/completions", {})
    assert chosen(server) == (1.0, 1.0, -1, 0.0, 1.0)
