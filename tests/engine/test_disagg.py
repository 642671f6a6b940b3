"""What an engine decides about prompts that another one could compute, and how it checks what that one sends."""

import numpy as np
import pytest

from tests.scheduler.harness import make_info
from tokenyard.base import InvalidRequestError, SamplingParams
from tokenyard.cost import get_profile
from tokenyard.disagg.peer_discovery import addresses_of
from tokenyard.disagg.protocol import Peer, Prefill, Want
from tokenyard.disagg.protocol.decisions import MAX_OFFER_TIMEOUT_S, MIN_OFFER_TIMEOUT_S, RemotePrefillRule
from tokenyard.disagg.protocol.messages import pack_ids
from tokenyard.engine.scheduler_process.attachments.disagg import request_for


def test_prompts_go_where_they_come_first():
    cost = get_profile("h100", "llama-3-8b").cost()
    idle, busy = (0.0, 1.0), (100.0, 1.0)

    def chosen(role, tokens, cached=0, load=idle, peer_load_s=0.0):
        peers = [Peer("least busy", load_s=peer_load_s), Peer("other", load_s=peer_load_s + 1.0)]
        found = RemotePrefillRule(role, cost, 16, 131_072).choose(peers, tokens, cached, lambda cost: load)
        return None if found is None else found.peer.name

    assert chosen("decode", 64) == "least busy"
    assert chosen("decode", 64, cached=1) is None, "too short"
    assert chosen("decode", 500, peer_load_s=100.0) == "least busy"
    assert chosen("both", 500, load=busy) == "least busy"
    assert chosen("both", 500) is None, "copying takes time"
    assert chosen("both", 500, load=busy, peer_load_s=101.0) is None
    assert RemotePrefillRule("decode", cost, 16, 1).choose([], 500, 0, lambda cost: idle) is None


def test_an_offer_is_waited_for_as_long_as_it_is_predicted_to_take():
    cost = get_profile("h100", "llama-3-8b").cost()
    rule = RemotePrefillRule("decode", cost, 16, 131_072)
    for load_s, expected in ((0.0, MIN_OFFER_TIMEOUT_S), (5.0, 20.0), (1000.0, MAX_OFFER_TIMEOUT_S)):
        found = rule.choose([Peer("one", load_s=load_s)], 100, 0, lambda cost: (0.0, 1.0))
        assert found.timeout_s == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        (pack_ids(np.array([5, 97], np.int32)), {}),
        (pack_ids(np.array([-1], np.int32)), {}),
        (b"abc", {}),
        (pack_ids(np.array([5], np.int32)), {"n": 3}),
        (pack_ids(np.array([5], np.int32)), {"temperature": -1.0}),
        (pack_ids(np.array([5], np.int32)), {"stop_token_ids": [97]}),
        (pack_ids(np.array([5], np.int32)), {"logit_bias": {400: 1.0}}),
    ],
)
def test_what_another_engine_wants_is_checked(prompt, fields):
    vocabulary = make_info().vocab_size
    want = Want("key", prompt, SamplingParams(**fields))
    with pytest.raises(InvalidRequestError):
        request_for(vocabulary, Prefill(1 << 40, want))
    right = Want("key", pack_ids(np.array([5], np.int32)), SamplingParams())
    assert request_for(vocabulary, Prefill(1 << 40, right)).request.handover


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://", "http://127.0.0.1:99999"])
def test_an_engine_that_is_not_there_is_an_error_of_the_network(url):
    with pytest.raises((OSError, ValueError)):
        addresses_of(url)
