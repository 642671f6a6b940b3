"""Log lines about finished requests: what they say, and what they keep to themselves."""

import json
import logging
import time

from tests.server.fake import FakeManager
from tokenyard.engine.processes.logs import JsonFormatter
from tokenyard.sim.traces.formats import read_trace


def lines(caplog):
    return [record for record in caplog.records if record.name == "tokenyard.requests"]


def ask(server, text="hello dog", **body):
    body = {"prompt": text, "max_tokens": 2, "rid": "r9", **body}
    assert server.client.post("/v1/completions", json=body).status_code == 200


def test_ids_and_lengths_but_no_text(start, caplog):
    caplog.set_level("INFO", logger="tokenyard.requests")
    ask(start(log_requests=True), n=2)
    assert [record.fields["index"] for record in lines(caplog)] == [0, 1]
    message = lines(caplog)[0].getMessage()
    assert "rid=r9" in message
    assert "prompt_tokens=2 output_tokens=2 cached_tokens=2" in message
    assert "dog" not in message
    assert "world" not in message


def test_the_json_lines_are_a_trace(start, caplog, tmp_path):
    caplog.set_level("INFO", logger="tokenyard.requests")
    server, began = start(log_requests=True), time.time()
    ask(server, priority=3, deadline_ms=5000)
    ask(server, text="hello hello dog", n=2)
    log = tmp_path / "server.log"
    other = '{"logger": "tokenyard.engine", "message": "x"}\n'
    records = [JsonFormatter().format(record) + "\n" for record in lines(caplog)]
    log.write_text("a box\n" + other + "".join(reversed(records)))
    workload = read_trace(log, "tokenyard-log")
    assert workload.prompt_tokens.tolist() == [2, 3, 3]
    assert workload.output_tokens.tolist() == [2, 2, 2]
    assert workload.priority.tolist()[0] == 3
    assert workload.deadline_s.tolist()[0] == 5.0
    assert began - 0.1 < json.loads(records[0])["arrival_s"] < time.time() + 0.1


def test_the_text_if_asked_for_on_one_line(start, caplog):
    caplog.set_level("INFO", logger="tokenyard.requests")
    ask(start(log_requests=True, log_requests_content=True), text="hello\nFinish: rid=fake")
    (record,) = lines(caplog)
    assert record.fields["prompt"] == "hello\nFinish: rid=fake"
    assert record.fields["output"] == "hello world"
    assert "\n" not in record.getMessage()


def test_long_texts_are_cut(start, caplog):
    caplog.set_level("INFO", logger="tokenyard.requests")
    manager = FakeManager()
    manager.context_length = 10_000
    ask(start(manager, log_requests=True, log_requests_content=True), text="dog " * 1000)
    assert len(lines(caplog)[0].fields["prompt"]) == 2000


def test_json_lines_have_the_facts_as_fields():
    record = logging.LogRecord("x", logging.INFO, "f", 1, "Finish: %s", ("a",), None)
    record.fields = {"rid": "a", "prompt_tokens": 5}
    line = json.loads(JsonFormatter().format(record))
    assert (line["message"], line["rid"], line["prompt_tokens"], line["level"]) == ("Finish: a", "a", 5, "info")
