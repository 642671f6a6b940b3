"""The HTTP back end against a real HTTP server over the fake engine."""

import pytest

from tests.server.conftest import Running
from tests.server.fake import FakeManager
from tokenyard import lang
from tokenyard.lang.runtime_endpoint import Endpoint, EndpointError
from tokenyard.server.state import ServerOptions


@pytest.fixture
def running():
    server = Running(ServerOptions(model_name="fake"), FakeManager())
    endpoint = Endpoint(server.url)
    lang.set_default_backend(endpoint)
    yield server
    endpoint.close()
    server.close()


def test_generated_parts_and_choices(running):
    @lang.function
    def program(s):
        s += "hello" + lang.gen("a", max_tokens=2) + " the"
        s += lang.select("b", [" fox", " dog"])

    state = program.run()
    assert state["a"] == "hello world"
    assert state["b"] in (" fox", " dog")
    assert state.get_meta_info("a")["completion_tokens"] == 2
    spec = running.manager.specs[0]
    assert spec.text == "hello"
    scored = [spec for spec in running.manager.specs if spec.logprobs is not None]
    assert len(scored) == 2
    assert all(spec.logprobs.prompt_from == len(spec.input_ids) - 1 for spec in scored)


def test_messages_go_through_the_servers_template(running):
    @lang.function
    def program(s):
        s += lang.user("hello")
        s += lang.assistant("world" + lang.gen("a", max_tokens=1))

    assert program.run()["a"] == "hello"
    _, messages, options = next(call for call in running.manager.calls if call[0] == "render")
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert options["continue_final_message"]


def test_refusals_carry_the_servers_message(running):
    @lang.function
    def program(s):
        s += "hello" + lang.gen("a", temperature=-1)

    with pytest.raises(EndpointError, match="400: temperature"):
        program.run()


def test_facts_of_the_server(running):
    endpoint = Endpoint(running.url + "/v1")
    endpoint.flush_cache()
    assert endpoint.get_server_info()
    endpoint.close()
