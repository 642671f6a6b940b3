"""What an engine decides about prompts that another one could compute, and how it checks what that one sends."""

import numpy as np
import pytest

from tests.scheduler.harness import make_info
from tokenyard.base import InvalidRequestError, SamplingParams
from tokenyard.disagg.peer_discovery import addresses_of
from tokenyard.disagg.protocol import Prefill, Want
from tokenyard.disagg.protocol.decisions import should_prefill_remotely
from tokenyard.disagg.protocol.messages import pack_ids
from tokenyard.engine.scheduler_process.attachments.disagg import DisaggConnector


def test_prompts_go_where_they_come_first():
    assert should_prefill_remotely("decode", 64, 64, 0.0, 9.0)
    assert not should_prefill_remotely("decode", 63, 64, 9.0, 0.0)
    assert should_prefill_remotely("both", 500, 64, here_s=0.4, there_s=0.1)
    assert not should_prefill_remotely("both", 500, 64, here_s=0.0, there_s=0.1)


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
    transfers = object.__new__(DisaggConnector)
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
