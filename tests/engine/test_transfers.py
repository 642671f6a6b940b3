"""What an engine decides about prompts that another one could compute, and what it takes from one that lies."""

import numpy as np
import pytest

from tests.scheduler.harness import make_info
from tokenyard.base import InvalidRequestError, SamplingParams
from tokenyard.engine.watch.dialer import addresses_of
from tokenyard.engine.watch.transfers import KvTransfers
from tokenyard.transfer.protocol import Prefill, Want
from tokenyard.transfer.protocol.deciding import worth_asking
from tokenyard.transfer.protocol.messages import pack_ids


def test_prompts_go_where_they_come_first():
    assert worth_asking("decode", 64, 64, 0.0, 9.0)
    assert not worth_asking("decode", 63, 64, 9.0, 0.0)
    assert worth_asking("both", 500, 64, here_s=0.4, there_s=0.1)
    assert not worth_asking("both", 500, 64, here_s=0.0, there_s=0.1)


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
    transfers = object.__new__(KvTransfers)
    transfers._info = make_info()
    want = Want("key", prompt, SamplingParams(**fields))
    with pytest.raises(InvalidRequestError):
        transfers._request_for(Prefill(1 << 40, want))
    request = transfers._request_for(Prefill(1 << 40, Want("key", pack_ids(np.array([5], np.int32)), SamplingParams())))
    assert request.request.handover


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://", "http://127.0.0.1:99999"])
def test_an_engine_that_is_not_there_is_an_error_of_the_network(url):
    with pytest.raises((OSError, ValueError)):
        addresses_of(url)
