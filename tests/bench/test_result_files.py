"""What other benchmark clients write is read, and the step times of a known engine are found in it again."""

import json

import numpy as np
import pytest

from tokenyard.base import ConfigError, StepWork
from tokenyard.bench.load_generator import ServerClient
from tokenyard.bench.result_files import read_result_file
from tokenyard.bench.server_facts import pool_tokens
from tokenyard.cli.flags import Parser
from tokenyard.cli.main import main
from tokenyard.cli.simulate import add_simulate_arguments
from tokenyard.cli.simulation_arguments import profile_of
from tokenyard.cost import get_profile, load_profile
from tokenyard.cost.observed_requests import ObservedRequest, fit_requests
from tokenyard.sim import Engine, run, synthetic

ONE = ObservedRequest(10.0, 10.5, 12.5, 100, 21)
OTHER = ObservedRequest(11.0, 11.25, 11.75, 40, 6)
"""Two overlapping requests, which every client records in its own way."""


def bench_serve(requests):
    """The lists of `vllm bench serve --save-result --save-detailed`."""
    return {
        "endpoint_type": "openai",
        "request_rate": "inf",
        "max_concurrency": len(requests),
        "mean_ttft_ms": 1.0,
        "input_lens": [one.prompt_tokens for one in requests],
        "output_lens": [one.output_tokens for one in requests],
        "ttfts": [one.first_s - one.start_s for one in requests],
        "itls": [
            [(one.end_s - one.first_s) / max(one.output_tokens - 1, 1)] * (one.output_tokens - 1) for one in requests
        ],
        "generated_texts": [""] * len(requests),
        "errors": [""] * len(requests),
    }


def vllm(requests):
    return json.dumps({**bench_serve(requests), "start_times": [one.start_s for one in requests]})


def sglang(requests):
    """This client records no times of sending, and an infinite rate as Python writes it."""
    return json.dumps({"backend": "sglang", **bench_serve(requests), "request_rate": float("inf")}) + "\n"


def guidellm(requests):
    records = [
        {
            "prompt_tokens": one.prompt_tokens,
            "output_tokens": one.output_tokens,
            "info": {
                "timings": {
                    "request_start": one.start_s,
                    "first_token_iteration": one.first_s,
                    "last_token_iteration": one.end_s,
                    "request_end": one.end_s + 0.01,
                }
            },
        }
        for one in requests
    ]
    return json.dumps({"benchmarks": [{"requests": {"successful": records, "incomplete": [], "errored": []}}]})


def old_guidellm(requests):
    records = [
        {
            "prompt_tokens": one.prompt_tokens,
            "output_tokens": one.output_tokens,
            "start_time": one.start_s,
            "first_token_time": one.first_s,
            "last_token_time": one.end_s,
            "end_time": one.end_s,
        }
        for one in requests
    ]
    return json.dumps({"benchmarks": [{"requests": {"successful": records, "incomplete": [], "errored": []}}]})


def aiperf(requests):
    lines = [
        {
            "metadata": {"request_start_ns": round(one.start_s * 1e9), "benchmark_phase": "profiling"},
            "metrics": {
                "time_to_first_token": {"value": 1e3 * (one.first_s - one.start_s), "unit": "ms"},
                "request_latency": {"value": 1e3 * (one.end_s - one.start_s), "unit": "ms"},
                "input_sequence_length": {"value": one.prompt_tokens, "unit": "tokens"},
                "output_sequence_length": {"value": one.output_tokens, "unit": "tokens"},
            },
            "error": None,
        }
        for one in requests
    ]
    failed = {"metadata": {"request_start_ns": 5}, "metrics": {}, "error": {"code": 500}}
    return "\n".join(map(json.dumps, [*lines, failed]))


def genai_perf(requests):
    def event(**fields):
        return {"response": f"data: {json.dumps(fields)}\n\n"}

    def record(one):
        times = np.linspace(one.first_s, one.end_s, one.output_tokens)
        words = [event(choices=[{"delta": {"content": "word"}}]) for _ in times]
        usage = {"prompt_tokens": one.prompt_tokens, "completion_tokens": one.output_tokens}
        return {
            "timestamp": round(one.start_s * 1e9),
            "response_timestamps": [round(at * 1e9) for at in (*times, one.end_s)],
            "response_outputs": [*words, event(choices=[], usage=usage)],
        }

    return json.dumps({"experiments": [{"experiment": {}, "requests": [record(one) for one in requests]}]})


def tokenyard(requests):
    records = [
        {
            "sent_s": one.start_s,
            "ttft_s": one.first_s - one.start_s,
            "latency_s": one.end_s - one.start_s,
            "prompt_tokens": one.prompt_tokens,
            "output_tokens": one.output_tokens,
            "cached_tokens": 0,
            "error": "",
        }
        for one in requests
    ]
    return json.dumps({"backend": "openai", "requests": records})


FORMS = [vllm, sglang, guidellm, old_guidellm, aiperf, genai_perf, tokenyard]


def write(tmp_path, text):
    path = tmp_path / "result.json"
    path.write_text(text)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_a_result_file_has_the_requests_of_its_run(form, tmp_path):
    (found,) = read_result_file(write(tmp_path, form([ONE, OTHER])))
    shift = found[0].start_s - ONE.start_s
    for one, wanted in zip(found, (ONE, OTHER), strict=True):
        assert (one.prompt_tokens, one.output_tokens) == (wanted.prompt_tokens, wanted.output_tokens)
        assert one.first_s - one.start_s == pytest.approx(wanted.first_s - wanted.start_s)
        assert one.end_s - one.first_s == pytest.approx(wanted.end_s - wanted.first_s)
        if form is not sglang:  # there both begin at once, as in a closed loop of two clients
            assert one.start_s == pytest.approx(wanted.start_s + shift)


def test_without_times_of_sending_the_next_request_begins_when_a_client_is_free(tmp_path):
    document = json.loads(sglang([ONE, OTHER, OTHER])) | {"max_concurrency": 2}
    (found,) = read_result_file(write(tmp_path, json.dumps(document)))
    assert [one.start_s for one in found] == pytest.approx([0.0, 0.0, OTHER.end_s - OTHER.start_s])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (json.dumps({"mean_ttft_ms": 3.0, "completed": 10}), "--save-detailed"),
        (json.dumps({"model": "x"}), "is not the result of"),
        ("not json", "neither JSON nor JSON lines"),
        ("", "is empty"),
        ("[1, 2]", "no JSON objects"),
        (json.dumps({"benchmarks": [{"requests": {}}]}), "expected fields"),
        (json.dumps(bench_serve([ONE]) | {"request_rate": 4.0}), "no start_times"),
        (json.dumps(bench_serve([ONE]) | {"errors": ["refused"]}), "no request that succeeded"),
        (json.dumps(bench_serve([ONE]) | {"itls": []}), "expected fields"),
        (json.dumps(bench_serve([ONE]) | {"max_concurrency": -1}), "expected fields"),
        (json.dumps(bench_serve([ONE]) | {"itls": [[float("inf")]]}), "result.json: a request's first token"),
        (json.dumps(bench_serve([ONE]) | {"input_lens": [0]}), "result.json: a request has no prompt"),
        (aiperf([ONE]).replace("input_sequence_length", "isl"), "expected fields"),
        (json.dumps({"metadata": {}, "metrics": None}), "expected fields"),
        (json.dumps({"requests": ["one"]}), "expected fields"),
    ],
)
def test_a_file_that_shows_no_requests_is_refused(text, complaint, tmp_path):
    with pytest.raises(ConfigError, match=complaint):
        read_result_file(write(tmp_path, text))


def simulated(rate, count=80):
    """Requests that an engine with known step times served, as their clients saw them."""
    result = run(synthetic("plain", count, rate=rate, seed=3), Engine(preset="vllm-default"))
    names = ("arrival_s", "first_token_s", "finished_s", "prompt_tokens", "completion_tokens")
    rows = zip(*(result.columns[name].tolist() for name in names), strict=True)
    return [ObservedRequest(start, first, end, prompt, output) for start, first, end, prompt, output in rows]


@pytest.fixture(scope="module")
def runs():
    return [simulated(rate) for rate in (1.0, 12.0)]


def test_the_step_times_of_a_known_engine_are_found_from_outside(runs):
    fit = fit_requests(runs)
    truth = get_profile("h100", "llama-3-8b").terms
    for rows, context in ((1, 500), (4, 2000), (16, 1000)):
        work = StepWork(rows, rows, rows, rows * context)
        assert fit.terms.step(work) == pytest.approx(truth.step(work), rel=0.06)
    work = StepWork()
    work.add_chunk(0, 1500)
    assert fit.terms.step(work) == pytest.approx(truth.step(work), rel=0.15)
    assert np.median(np.abs(fit.tpot_errors)) < 0.03


def test_too_few_requests_are_refused(runs):
    with pytest.raises(ConfigError, match="only 3 requests show"):
        fit_requests([[ONE, OTHER]])


def test_a_profile_of_a_result_file_runs_in_the_simulator(runs, tmp_path, capsys):
    paths = [tmp_path / f"{number}.json" for number in range(len(runs))]
    for path, requests in zip(paths, runs, strict=True):
        path.write_text(vllm(requests))
    out = tmp_path / "p.json"
    sizes = ["--max-total-tokens", "400k", "--device-name", "Their GPU"]
    assert main(["calibrate", "--results", *map(str, paths), "--output", str(out), *sizes]) == 0
    profile = load_profile(out)
    assert (profile.device, profile.kv_pool_tokens) == ("their-gpu", 400_000)
    assert "held out" in capsys.readouterr().out
    assert main(["simulate", "--profile", str(out), "--synthetic", "plain", "--limit", "20"]) == 0
    assert "held out" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--results", "nowhere.json"], "cannot read nowhere.json"),
        (["--results", "a.json", "--server", "http://localhost:1"], "give one of them"),
        (["--server", "http://localhost:1"], "is a server running there"),
        (["--server", "localhost:1"], "write it as http://HOST:PORT"),
        (["a-model", "--results", "a.json"], "leave out a-model"),
    ],
)
def test_what_cannot_be_calibrated_is_one_line(words, complaint, capsys):
    assert main(["calibrate", *words]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.strip().count("\n") == 0


@pytest.mark.parametrize("listed", [{"data": []}, {"data": [{}]}, {"data": "none"}, ["model"]])
def test_a_server_without_models_cannot_be_calibrated(listed, monkeypatch, capsys):
    async def get(self, path):
        return listed

    monkeypatch.setattr(ServerClient, "get", get)
    assert main(["calibrate", "--server", "http://localhost:1"]) == 2
    assert "lists no model" in capsys.readouterr().err


def test_a_simulation_takes_the_pool_of_a_running_server(monkeypatch):
    pages = {"/v1/models": {"data": [{"id": "m", "max_model_len": 4096}]}, "/get_server_info": None}
    metrics = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="400"} 1.0'

    async def get(self, path):
        return pages[path]

    async def text(self, path):
        return metrics

    monkeypatch.setattr(ServerClient, "get", get)
    monkeypatch.setattr(ServerClient, "text", text)
    parser = Parser()
    add_simulate_arguments(parser)
    profile = profile_of(parser.parse_args(["--synthetic", "plain", "--from-server", "http://one:1"]))
    assert (profile.kv_pool_tokens, profile.context_length) == (6400, 4096)
    metrics = ""
    with pytest.raises(ConfigError, match="how large its KV pool is"):
        profile_of(parser.parse_args(["--synthetic", "plain", "--from-server", "http://other:1"]))


@pytest.mark.parametrize(
    ("metrics", "tokens"),
    [
        ('vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="2000"} 1.0', 32_000),
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0', None),
        ('# HELP x\nsglang:max_total_num_tokens{model_name="m"} 9.5e+04\n', 95_000),
        ("", None),
    ],
)
def test_the_pool_of_a_foreign_server_is_read_from_its_metrics(metrics, tokens):
    assert pool_tokens(metrics) == tokens
