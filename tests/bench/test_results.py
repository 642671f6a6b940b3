"""From answers to numbers and to the table."""

import json

import pytest

from tokenyard.base import ConfigError
from tokenyard.bench.backends import (
    BACKENDS,
    ChatBackend,
    CompletionsBackend,
    NativeBackend,
    RequestFuncOutput,
    RequestOptions,
)
from tokenyard.bench.datasets import DatasetRow
from tokenyard.bench.load_generator import BenchResult
from tokenyard.bench.results import Targets, peak_concurrency, peak_tokens_per_s, summarize
from tokenyard.bench.table import append_line, remarks, serving_table
from tokenyard.cli import bench_arguments

OPTIONS = RequestOptions("m", True, {"top_k": 3})


def answer(times, *, sent_s=0.0, prompt=10, name="", error=""):
    made = RequestFuncOutput(service_class=name, sent_s=sent_s, prompt_tokens=prompt, error=error)
    for time in times:
        made.arrived(time, 1)
        made.output_tokens += 1
    return made


@pytest.fixture
def run():
    answers = [
        answer([0.1, 0.2, 0.3], name="chat"),
        answer([0.5, 0.6], sent_s=0.2, name="chat"),
        answer([2.0], sent_s=0.9, name="batch"),
        answer([], sent_s=1.0, name="batch", error="503: full"),
    ]
    return BenchResult(answers, 4.0)


def numbers_of(run, targets="ttft:1000,tpot:200"):
    head = {"backend": "tokenyard", "request_rate": 8.0, "max_concurrency": None}
    return head | summarize(run, Targets.parse(targets), None)


def test_summary(run):
    numbers = numbers_of(run)
    assert (numbers["completed"], numbers["failed"]) == (3, 1)
    assert (numbers["total_input_tokens"], numbers["total_output_tokens"]) == (30, 6)
    assert numbers["output_throughput"] == pytest.approx(1.5)
    assert numbers["concurrency"] == pytest.approx((0.3 + 0.6 + 2.0) / 4)
    assert numbers["median_ttft_ms"] == pytest.approx(500)
    assert numbers["mean_tpot_ms"] == pytest.approx(100)
    assert numbers["max_itl_ms"] == pytest.approx(100)


def test_goodput_counts_failures_as_missed(run):
    numbers = numbers_of(run)
    assert numbers["attainment"] == pytest.approx(0.5)
    assert numbers["request_goodput"] == pytest.approx(0.5)
    assert numbers["goodput_by_class"]["chat"]["attainment"] == 1.0
    assert numbers["goodput_by_class"]["batch"]["attainment"] == 0.0
    assert numbers_of(run, "e2el:400")["attainment"] == pytest.approx(0.25)


@pytest.mark.parametrize("text", ["", "ttft", "ttft:x", "itl:5", "tpot:0", "ttft:nan"])
def test_wrong_targets_are_refused(text):
    with pytest.raises(ConfigError, match="--goodput"):
        Targets.parse(text)


def test_peaks(run):
    assert peak_tokens_per_s(run.answers) == 5.0
    assert peak_concurrency(run.answers) == 2
    assert peak_concurrency([]) == 0
    assert peak_tokens_per_s([]) == 0.0


def test_events_with_several_tokens_share_their_time():
    made = RequestFuncOutput()
    made.arrived(1.0, 1)
    made.arrived(1.4, 4)
    assert made.gaps_s == pytest.approx([0.1] * 4)


def test_table_has_its_rows_in_order(run):
    table = serving_table(numbers_of(run), cache_report=True)
    labels = [line.split(":")[0] for line in table.splitlines() if ":" in line]
    wanted = ["Backend", "Traffic request rate", "Max request concurrency", "Successful requests", "Failed requests"]
    assert labels[:5] == wanted
    places = [labels.index(label) for label in ("Request throughput (req/s)", "Concurrency", "Mean E2E Latency (ms)")]
    assert places == sorted(places)
    assert "Max request concurrency:                 not set" in table
    assert "Cache hit rate (%):" in table
    assert "  batch (%):" in table
    assert all(line[40] == " " != line[41] for line in table.splitlines() if ": " in line)


def test_a_run_without_answers_has_a_table():
    assert "Successful requests:                     0" in serving_table(
        numbers_of(BenchResult([], 0.0)), cache_report=True
    )


def test_remarks_name_failures_and_a_late_client(run):
    run.answers[0].late_s = 30.0
    lines = remarks(run.answers, numbers_of(run))
    assert "1 failed: 503: full" in lines
    assert any("late" in line for line in lines)


def test_result_lines_are_json(tmp_path, run):
    path = tmp_path / "r.jsonl"
    for _ in range(2):
        append_line(path, numbers_of(run) | {"request_rate": float("inf")})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["request_rate"] for line in lines] == ["inf", "inf"]
    with pytest.raises(ConfigError, match="cannot be written"):
        append_line(tmp_path / "no" / "r.jsonl", {})


def test_backends_of_the_command_line_are_those_there_are():
    assert set(bench_arguments.BACKENDS) == set(BACKENDS)


def test_bodies():
    native = NativeBackend(OPTIONS).body(DatasetRow([1, 2], 2, 7, extra={"priority": 1}))
    assert native["input_ids"] == [1, 2]
    assert native["sampling_params"]["max_new_tokens"] == 7
    assert (native["top_k"], native["priority"]) == (3, 1)
    assert NativeBackend(OPTIONS).body(DatasetRow("x", 1, 7))["text"] == "x"
    assert CompletionsBackend(OPTIONS).body(DatasetRow("x", 1, 7))["prompt"] == "x"
    assert ChatBackend(OPTIONS).body(DatasetRow("x", 1, 7))["messages"] == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("kind", "content"),
    [(NativeBackend, [{"role": "user"}]), (CompletionsBackend, [{"role": "user"}]), (ChatBackend, [1, 2])],
)
def test_content_that_a_backend_does_not_take(kind, content):
    with pytest.raises(ConfigError, match="--backend"):
        kind(OPTIONS).body(DatasetRow(content, 0, 1))


def test_completions_count_tokens_by_usage():
    backend, made = CompletionsBackend(OPTIONS), RequestFuncOutput()
    assert backend.read({"choices": [{"text": "a"}]}, made) == 1
    assert backend.read({"choices": [{"text": ""}]}, made) == 0
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    assert backend.read({"choices": [], "usage": usage}, made) == 0
    assert (made.text, made.prompt_tokens, made.output_tokens, made.cached_tokens) == ("a", 3, 2, 1)


def test_native_events_are_cumulative():
    backend, made = NativeBackend(OPTIONS), RequestFuncOutput()
    for tokens, text in ((1, "a"), (4, "abcd")):
        meta = {"completion_tokens": tokens, "prompt_tokens": 5, "cached_tokens": 2, "finish_reason": None}
        assert backend.read({"text": text, "meta_info": meta}, made) == (1 if tokens == 1 else 3)
    assert (made.text, made.output_tokens, made.error) == ("abcd", 4, "")
    meta = meta | {"finish_reason": {"type": "abort", "message": "no room"}}
    assert backend.read({"text": "abcd", "meta_info": meta}, made) == 0
    assert made.error == "no room"
