import gzip
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tokenyard.base import ConfigError, Slo
from tokenyard.sim.traces.formats import FORMATS, TRACE_FORMATS, detect_format, read_trace
from tokenyard.sim.traces.prompt_ids import TokenContent, UniqueContent
from tokenyard.sim.traces.read_options import ReadOptions
from tokenyard.sim.traces.synthetic import synthetic
from tokenyard.sim.traces.workload import NO_PRIORITY

TRACES = Path(__file__).resolve().parents[2] / "../shared/traces"


def shared(name: str) -> Path:
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"the recorded traces are not next to the checkout ({name})")
    return path


def words(text: str) -> np.ndarray:
    return np.array([len(word) for word in text.split()], np.int32)


def write_lines(path: Path, *records) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return path


def test_mooncake_as_published():
    path = shared("mooncake/conversation_trace.jsonl.gz")
    workload = read_trace(path, "mooncake", ReadOptions(seed=1))
    assert len(workload) == 12_031
    assert workload.max_prompt_tokens == 126_195
    assert round(workload.prompt_tokens.mean()) == 12_035
    assert len(np.unique(workload.arrival_s)) == 12_031, "time stamps must be spread over their tick"
    one, other = workload.content.prompt_ids(5, 2000), workload.content.prompt_ids(9, 2000)
    assert (one[:512] == other[:512]).all(), "every conversation begins with block 0"
    assert (one[512:1024] != other[512:1024]).any()


BAILIAN = {
    "chat_id": 1,
    "parent_chat_id": -1,
    "timestamp": 61.1,
    "input_length": 37,
    "output_length": 9,
    "type": "text",
}


def test_bailian_counts_seconds_and_blocks_of_16_tokens(tmp_path):
    later = {**BAILIAN, "timestamp": 63.6, "hash_ids": [5, 6, 8]}
    path = write_lines(tmp_path / "b.jsonl", {**BAILIAN, "hash_ids": [5, 6, 7]}, later)
    workload = read_trace(path, detect_format(path))
    assert workload.arrival_s.tolist() == pytest.approx([0.0, 2.5])
    one, other = (workload.content.prompt_ids(place, 37) for place in (0, 1))
    assert (one == other).tolist() == [True] * 32 + [False] * 5


def test_hashes_of_smaller_blocks_are_not_taken_for_larger_ones(tmp_path):
    record = {**BAILIAN, "input_length": 1600, "hash_ids": list(range(100))}
    path = write_lines(tmp_path / "m.jsonl", record)
    with pytest.raises(ConfigError, match="100 ids where 4 are needed"):
        read_trace(path, "mooncake")


def test_spreading_depends_on_the_seed_alone():
    path = shared("mooncake/conversation_trace.jsonl.gz")
    once, again, other = (read_trace(path, "mooncake", ReadOptions(seed=seed)).arrival_s for seed in (1, 1, 2))
    assert (once == again).all()
    assert (once != other).any()


def test_azure_as_published():
    workload = read_trace(shared("azure2023/AzureLLMInferenceTrace_conv.csv.gz"), "azure")
    assert (len(workload), workload.max_prompt_tokens, workload.max_output_tokens) == (19_366, 14_050, 1000)
    assert workload.arrival_s[0] == 0.0
    assert workload.arrival_s[1] == pytest.approx(4.314579, abs=1e-6)
    assert isinstance(workload.content, UniqueContent)


def test_vidur_lengths_get_drawn_arrivals():
    workload = read_trace(
        shared("vidur/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv.gz"), "vidur", ReadOptions(seed=3)
    )
    assert len(workload) == 28_257
    assert workload.arrival_s[-1] == pytest.approx(28_257, rel=0.05)


def test_vllm_measured_keeps_its_token_ids():
    workload = read_trace(shared("vllm-measured/sharegpt-llama-3.1-8b-300-sps10.jsonl.gz"), "vllm-measured")
    assert len(workload) == 300
    assert isinstance(workload.content, TokenContent)
    assert workload.content.prompt_ids(0, 3).tolist() == [5971, 2927, 220]


def test_servegen_draws_the_published_rate():
    pytest.importorskip("zstandard")
    path = shared("servegen-deepseek-r1/servegen-deepseek-r1.tar.zst")
    workload = read_trace(path, "servegen", ReadOptions(seed=0, limit=20_000))
    assert len(workload) == 20_000
    assert 10.0 < 20_000 / workload.arrival_s[-1] < 45.0


def test_agent_sessions_go_through_the_tokenizer():
    pytest.importorskip("zstandard")
    path = shared("lmcache-agent/miniswe.tar.zst")
    workload = read_trace(path, "lmcache-agent", ReadOptions(tokenize=words))
    assert len(workload) == 402
    assert len(workload.tenants) == 21
    assert (np.diff(workload.arrival_s) >= 0).all()


def test_tokenyard_form_with_every_field(tmp_path):
    path = write_lines(
        tmp_path / "t.jsonl",
        {"arrival_s": 1.5, "prompt_tokens": 700, "output_tokens": 3, "hash_ids": [1, 2], "tenant": "a", "class": "x"},
        {"arrival_s": 2, "prompt_tokens": 600, "output_tokens": 4, "hash_ids": [1, 9], "priority": 3, "deadline_s": 9}
        | {"slo_ttft_s": 0.5, "slo_tpot_s": 0.25, "max_new_tokens": 50},
    )
    workload = read_trace(path, "tokenyard")
    assert workload.arrival_s.tolist() == [0.0, 0.5]
    first, second = workload.request(0), workload.request(1)
    assert (first.tenant, first.service_class, first.priority, first.deadline_ns) == ("a", "x", None, None)
    assert (second.tenant, second.priority, second.deadline_ns) == ("", 3, 9_000_000_000)
    assert (first.slo, second.slo) == (None, Slo(500_000_000, 250_000_000))
    assert workload.priority.tolist() == [NO_PRIORITY, 3]
    assert (first.prompt_ids[:512] == second.prompt_ids[:512]).all()
    assert first.sampling.max_new_tokens == 4, "the true length of an answer is not passed on"
    assert second.sampling.max_new_tokens == 50


def test_tokenyard_form_with_token_ids(tmp_path):
    path = write_lines(tmp_path / "t.jsonl", {"arrival_s": 0, "token_ids": [7, 8, 9], "output_tokens": 0})
    workload = read_trace(path, "tokenyard")
    assert workload.request(0).prompt_ids.tolist() == [7, 8, 9]
    assert workload.output_tokens.tolist() == [1]


def test_openai_bodies_with_unix_and_iso_stamps(tmp_path):
    message = [{"role": "user", "content": [{"type": "text", "text": "one two"}]}]
    path = write_lines(
        tmp_path / "t.jsonl",
        {"timestamp": "2026-01-01T00:00:00Z", "body": {"prompt": "a bb", "max_tokens": 9}, "output_tokens": 5},
        {"timestamp": 1767225602.5, "messages": message, "user": "u", "usage": {"completion_tokens": 6}},
    )
    workload = read_trace(path, "openai-jsonl", ReadOptions(tokenize=words))
    assert workload.arrival_s.tolist() == [0.0, 2.5]
    assert workload.prompt_tokens.tolist() == [2, 3]
    assert workload.output_tokens.tolist() == [5, 6]
    assert workload.request(1).tenant == "u"
    assert [workload.request(index).sampling.max_new_tokens for index in (0, 1)] == [9, 6]


GOOD = {"arrival_s": 1.0, "prompt_tokens": 5, "output_tokens": 1}


@pytest.mark.parametrize(
    ("records", "complaint"),
    [
        ([], "holds no request"),
        ([GOOD, {**GOOD, "arrival_s": 0.5}], "line 2: the clock goes backwards"),
        ([{**GOOD, "slo_ttft_s": 0}], "slo_ttft_s is 0"),
        ([{**GOOD, "deadline_s": -1}], "deadline_s is -1"),
        ([{**GOOD, "prompt_tokens": 0}], "a prompt of 0 tokens"),
        ([{**GOOD, "prompt_tokens": 2.5}], "not a whole number"),
        ([{**GOOD, "output_tokens": -1}], "an answer of -1 tokens"),
        ([{**GOOD, "output_tokens": 9, "max_new_tokens": 8}], "max_new_tokens is 8; it must be from 9"),
        ([{"timestamp": 1, "input_length": 5}], "prompt_tokens is missing"),
        ([{**GOOD, "arrival_s": "soon"}], "arrival_s is 'soon', not a number"),
        ([{**GOOD, "hash_ids": []}], "hash_ids must hold 1 ids"),
        ([{**GOOD, "hash_ids": ["x"]}], "must be whole numbers"),
        ([{**GOOD, "token_ids": [-1]}], "list of token ids"),
        ([GOOD, {**GOOD, "hash_ids": [1]}], "use one form"),
        ([{**GOOD, "prompt_tokens": float("nan")}], "finite"),
        ([{**GOOD, "prompt_tokens": 10**400}], "finite"),
        ([{**GOOD, "prompt_tokens": 10.5}], "not a whole number"),
        ([GOOD, {**GOOD, "arrival_s": 2e9}], "after the first"),
        ([{**GOOD, "priority": 2**31}], "priority is"),
        ([{**GOOD, "tenant": ["a"]}], "tenant is"),
        ([{**GOOD, "hash_ids": [1], "block_tokens": 0}], "block_tokens is 0"),
        ([{**GOOD, "hash_ids": [1], "block_tokens": 2**40}], "block_tokens is"),
        ([{**GOOD, "token_ids": [1, 2], "prompt_tokens": 77}], "holds 2 ids"),
        ([{**GOOD, "token_ids": [1], "hash_ids": [1]}], "not both"),
        ([{"arrival_s": 0, "output_tokens": 1, "token_ids": [1.5]}], "list of token ids"),
        ([{"arrival_s": 0, "output_tokens": 1, "token_ids": ["7"]}], "list of token ids"),
        ([{"arrival_s": 0, "output_tokens": 1, "token_ids": [[1], [2, 3]]}], "list of token ids"),
        ([[1, 2]], "a JSON object is needed"),
    ],
)
def test_a_bad_tokenyard_trace_is_one_clear_line(tmp_path, records, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_trace(write_lines(tmp_path / "t.jsonl", *records), "tokenyard")
    assert "\n" not in caught.value.message


def test_json_nested_too_deeply_is_one_clear_line(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="line 1: cut off or not JSON"):
        read_trace(path, "tokenyard")


def test_null_means_absent(tmp_path):
    optional = ("token_ids", "hash_ids", "block_tokens", "tenant", "class", "priority", "deadline_s")
    workload = read_trace(write_lines(tmp_path / "t.jsonl", {**GOOD, **dict.fromkeys(optional)}), "tokenyard")
    assert workload.tenants == workload.classes == ("",)


@pytest.mark.parametrize("limit", [0, -1])
@pytest.mark.parametrize("trace_format", sorted(TRACE_FORMATS))
def test_limits_below_one_are_refused_by_every_reader(tmp_path, trace_format, limit):
    with pytest.raises(ConfigError, match="--limit is"):
        read_trace(tmp_path / "t", trace_format, ReadOptions(limit=limit))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("2023-11-16 18:15:46.68,12.7,2", "not a number of tokens"),
        ("2023-11-16 18:15:46.68,inf,2", "not a number of tokens"),
        ("1700158546680,12,2", "Unix seconds are needed"),
        ("16.11.2023 18:15,12,2", "no time stamp"),
        ("2023-11-16 18:15:46.68," + "1" * 200_000 + ",2", "no line of a CSV file"),
    ],
)
def test_a_bad_csv_line_is_one_clear_line(tmp_path, line, complaint):
    path = tmp_path / "a.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{line}\n")
    with pytest.raises(ConfigError, match=f"line 2: .*{complaint}"):
        read_trace(path, "azure")


def test_a_clock_going_backwards_is_reported_with_its_amount(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5,1,2\n2023-11-16 18:15:46.25,1,2\n")
    with pytest.raises(ConfigError, match=r"line 3: the clock goes backwards, by 0\.25 s"):
        read_trace(path, "azure")


def test_files_cut_off_are_refused(tmp_path):
    path = write_lines(tmp_path / "t.jsonl", GOOD, GOOD)
    text = path.read_text()
    path.write_text(text[:-20])
    with pytest.raises(ConfigError, match="line 2: cut off"):
        read_trace(path, "tokenyard")
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(text.encode() * 50)[:-40])
    with pytest.raises(ConfigError, match="cut off or no gzip"):
        read_trace(packed, "tokenyard")


@pytest.mark.parametrize("name", ["T.JSONL.GZ", "t"])
def test_how_a_file_is_packed_is_read_off_its_bytes(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    assert len(read_trace(tmp_path / name, detect_format(tmp_path / name))) == 1


def test_zstd_in_several_frames_or_cut_off(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    line = json.dumps(GOOD).encode() + b"\n"
    packed = tmp_path / "t.jsonl.zst"
    frames = zstandard.ZstdCompressor().compress(line * 50) + zstandard.ZstdCompressor().compress(line * 30)
    packed.write_bytes(frames)
    assert len(read_trace(packed, "tokenyard")) == 80
    packed.write_bytes(frames[:-3])
    with pytest.raises(ConfigError, match="cut off or no zstd"):
        read_trace(packed, "tokenyard")


def test_without_zstandard_the_line_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "t.jsonl.zst").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"pip install 'tokenyard\[sim\]'"):
        read_trace(tmp_path / "t.jsonl.zst", "tokenyard")


def test_a_csv_line_cut_off_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:47.1,3")
    with pytest.raises(ConfigError, match="line 3: 2 columns instead of 3"):
        read_trace(path, "azure")


@pytest.mark.parametrize("trace_format", sorted(TRACE_FORMATS))
def test_foreign_files_are_refused_by_every_reader(tmp_path, trace_format):
    path = tmp_path / "foreign"
    path.write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe\x00")
    with pytest.raises(ConfigError) as caught:
        read_trace(path, trace_format, ReadOptions(tokenize=words))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("trace_format", sorted(TRACE_FORMATS))
def test_missing_files_are_refused_by_every_reader(tmp_path, trace_format):
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "absent.jsonl", trace_format, ReadOptions(tokenize=words))


def test_a_log_without_requests_is_refused(tmp_path):
    path = write_lines(tmp_path / "server.log", {"logger": "tokenyard.engine", "message": "x"})
    with pytest.raises(ConfigError, match="holds no line of"):
        read_trace(path, "tokenyard-log")


def test_text_traces_ask_for_a_tokenizer(tmp_path):
    path = write_lines(tmp_path / "t.jsonl", {"timestamp": 1, "prompt": "x", "output_tokens": 1})
    with pytest.raises(ConfigError, match="--tokenizer"):
        read_trace(path, "openai-jsonl")


def test_an_answer_without_length_is_not_guessed(tmp_path):
    path = write_lines(tmp_path / "t.jsonl", {"timestamp": 1, "prompt": "x"})
    with pytest.raises(ConfigError, match="answer's length is missing"):
        read_trace(path, "openai-jsonl", ReadOptions(tokenize=words))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"timestamp": 1.7e12, "prompt": "x"}, "Unix seconds"),
        (
            {"timestamp": 1, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "something else than text",
        ),
        ({"timestamp": 1, "messages": [{"role": "user", "content": 5}]}, "something else than text"),
        ({"timestamp": 1, "prompt": "x", "user": {}}, "user is"),
    ],
)
def test_bodies_that_would_mislead_are_refused(tmp_path, fields, complaint):
    path = write_lines(tmp_path / "t.jsonl", {**fields, "output_tokens": 1})
    with pytest.raises(ConfigError, match=complaint):
        read_trace(path, "openai-jsonl", ReadOptions(tokenize=words))


def test_the_length_may_stand_in_the_body_of_the_response(tmp_path):
    response = {"status_code": 200, "body": {"usage": {"completion_tokens": 7}}}
    path = write_lines(tmp_path / "t.jsonl", {"timestamp": 1, "body": {"prompt": "x"}, "response": response})
    assert read_trace(path, "openai-jsonl", ReadOptions(tokenize=words)).output_tokens.tolist() == [7]


@pytest.mark.parametrize("text", ["{}\n", '{"timestamp": 1, "input": null, "output": "x"}\n', "cut"])
def test_a_bad_session_is_one_clear_line(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=r"a.jsonl, line 1: "):
        read_trace(tmp_path, "lmcache-agent", ReadOptions(tokenize=words))


def test_sessions_may_hold_blank_lines_and_odd_separators(tmp_path):
    call = '{"timestamp": 1, "input": "a\u2028b", "output": "c"}\n'
    (tmp_path / "a.jsonl").write_text("\ufeff" + call + "\n" + call, encoding="utf-8")
    assert len(read_trace(tmp_path, "lmcache-agent", ReadOptions(tokenize=words))) == 2
    assert len(read_trace(tmp_path / "a.jsonl", "lmcache-agent", ReadOptions(tokenize=words))) == 2


@pytest.mark.parametrize(
    ("window", "lengths", "complaint"),
    [
        ("0,nan,1,Gamma,1.0,0.5", "{10: 1.0}", "no window"),
        ("0,1,1,Gamma,-1.0,0.5", "{10: 1.0}", "no window"),
        ("0,1,1,Gamma,1.0,0", "{10: 1.0}", "requests in a window"),
        ("0,1,1,Gamma,1.0,0.5", "{10: -1.0, 20: 0.5}", "dataset.json"),
        ("0,1,1,Gamma,1.0,0.5", "{99999999999: 1.0}", "dataset.json"),
        ("0,1,1,Gamma,1.0,0.5", "{10: 0.0}", "dataset.json"),
    ],
)
def test_bad_client_models_are_one_clear_line(tmp_path, window, lengths, complaint):
    (tmp_path / "chunk-0-trace.csv").write_text(window + "\n")
    steps = {"0": {"input_tokens": lengths, "output_tokens": "{3: 1.0}"}}
    (tmp_path / "chunk-0-dataset.json").write_text(json.dumps(steps))
    with pytest.raises(ConfigError, match=complaint):
        read_trace(tmp_path, "servegen")


def test_client_models_from_a_folder_and_a_tar(tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "chunk-0-trace.csv").write_text("0,0,0,,0,0\n600,2,1,Gamma,1.0,0.5\n")
    steps = {"0": {"input_tokens": "{10: 0.5, 20: 0.5}", "output_tokens": "{3: 1.0}"}}
    (folder / "chunk-0-dataset.json").write_text(json.dumps(steps))
    workload = read_trace(folder, "servegen")
    assert set(workload.prompt_tokens.tolist()) == {10, 20}
    assert 1000 < len(workload) < 1400
    with tarfile.open(tmp_path / "models.tar", "w") as archive:
        archive.add(folder, "models")
    assert (read_trace(tmp_path / "models.tar", "servegen").arrival_s == workload.arrival_s).all()


def test_an_unknown_format_lists_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match="mooncake"):
        read_trace(tmp_path / "t", "moonbake")


def test_scaling_and_limiting(tmp_path):
    records = [{**GOOD, "arrival_s": float(i)} for i in range(4)]
    workload = read_trace(write_lines(tmp_path / "t.jsonl", *records), "tokenyard")
    assert workload.scaled(2.0).arrival_s.tolist() == [0.0, 0.5, 1.0, 1.5]
    assert len(workload.limited(3)) == 3
    assert len(workload.limited(None)) == 4
    for factor in (0.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="--rate-scale"):
            workload.scaled(factor)
    with pytest.raises(ConfigError, match="--limit"):
        workload.limited(0)


@pytest.mark.parametrize("rate", [1.0, 12.0, 40.0])
def test_conversations_come_at_the_rate_that_is_asked_for(rate):
    workload = synthetic("multi-turn", 2000, rate, seed=3)
    assert len(workload) / workload.span_s == pytest.approx(rate, rel=0.15)
    first_half = int((workload.arrival_s < workload.span_s / 2).sum())
    assert first_half == pytest.approx(1000, rel=0.15)
    ids = [workload.content.prompt_ids(index, int(workload.prompt_tokens[index])) for index in range(2000)]
    beginnings = [one[:32].tobytes() for one in ids]
    assert len(set(beginnings)) < 2000, "later turns repeat the beginning of earlier ones"


def test_a_field_that_is_not_read_is_named_once_with_the_one_that_may_be_meant(tmp_path):
    records = [{**GOOD, "pirority": 3}, {**GOOD, "pirority": 3, "note": "x"}, GOOD]
    notes = read_trace(write_lines(tmp_path / "t.jsonl", *records), "tokenyard").notes
    assert len(notes) == 2
    assert "'pirority' is not read (t.jsonl, line 1); did you mean priority?" in notes[0]
    assert notes[1] == "the field 'note' is not read (t.jsonl, line 2)"


def mooncake_file(path, stamps):
    lines = [{"timestamp": at, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]} for at in stamps]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_fine_clock_is_not_spread(tmp_path):
    path = mooncake_file(tmp_path / "fine.jsonl", [27482, 27482, 30535, 30990, 31001])
    workload = read_trace(path, "mooncake")
    np.testing.assert_allclose(workload.arrival_s, [0.0, 0.0, 3.053, 3.508, 3.519])


def test_a_ticking_clock_is_spread_over_its_tick(tmp_path):
    path = mooncake_file(tmp_path / "ticks.jsonl", [0, 0, 2999, 2999, 6000, 6000, 12000, 12000])
    arrivals = read_trace(path, "mooncake").arrival_s
    assert len(set(arrivals.tolist())) == 8
    path = mooncake_file(tmp_path / "ticks.jsonl", [0] * 50 + [2000] * 50)
    arrivals = read_trace(path, "mooncake").arrival_s
    assert 1.5 < arrivals[:50].max() < 2.0 <= arrivals[50:].min() < 2.5


def test_a_limit_reads_no_further(tmp_path):
    path = tmp_path / "azure.csv"
    good = "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01.017335+00:00,2399,6\n"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + good + "cut")
    workload = read_trace(path, "azure", ReadOptions(limit=2))
    np.testing.assert_allclose(workload.arrival_s, [0.0, 1.007405], atol=1e-6)
    with pytest.raises(ConfigError, match="line 4: 1 columns instead of 3"):
        read_trace(path, "azure")


def test_a_table_is_read_by_its_names(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text("\ufeff, generatedtokens,TimeStamp,more,CONTEXTTOKENS\r\n0,5,17,x,9\r\n1,6,18.5,y,8", newline="")
    workload = read_trace(path, "azure")
    assert workload.arrival_s.tolist() == [0.0, 1.5]
    assert workload.prompt_tokens.tolist() == [9, 8]
    assert workload.output_tokens.tolist() == [5, 6]


def test_burstgpt_seconds_are_spread_where_many_share_one(tmp_path):
    path = tmp_path / "burst.csv"
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    lines = [f"{second},ChatGPT,{472 + second},18,490,Conversation log\n" for second in (5, 45, 118)]
    path.write_text(header + "".join(lines))
    workload = read_trace(path, "burstgpt")
    assert workload.arrival_s.tolist() == [0.0, 40.0, 113.0]
    assert workload.prompt_tokens.tolist() == [477, 517, 590]
    path.write_text(header + 4 * lines[0] + 4 * lines[0].replace("5,", "6,", 1))
    arrivals = read_trace(path, "burstgpt").arrival_s
    assert len(set(arrivals.tolist())) == 8
    assert 0.0 < arrivals[0] < arrivals[3] < 1.0 < arrivals[4] < arrivals[7] < 2.0


def test_a_trace_cut_from_the_middle_begins_at_once(tmp_path):
    path = mooncake_file(tmp_path / "later.jsonl", [1800000] * 4 + [1803000] * 4)
    assert read_trace(path, "mooncake").arrival_s[0] < 3.0


def test_vidur_with_times(tmp_path):
    path = tmp_path / "splitwise.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n1.5,10,2\n4.0,20,3\n")
    workload = read_trace(path, "vidur")
    assert workload.arrival_s.tolist() == [0.0, 2.5]
    assert workload.prompt_tokens.tolist() == [10, 20]


def test_blis_prompts_of_a_group_share_their_beginning(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "request_id,client_id,tenant_id,slo_class,vllm_priority,session_id,round_index,prefix_group,prefix_length,streaming,"
        "input_tokens,output_tokens,deadline_us,server_input_tokens,arrival_time_us,num_chunks,status,finish_reason\n"
        "0,c,gold,interactive,2,,0,system,64,true,100,7,0,0,1000000,7,ok,stop\n"
        "1,c,free,batch,,,0,system,64,true,100,3,30000000,168,1500000,3,timeout,\n"
        "2,c,free,batch,,,0,,0,true,50,4,0,54,3000000,4,ok,length\n"
    )
    assert detect_format(path) == "blis"
    workload = read_trace(path, "blis")
    assert workload.arrival_s.tolist() == [0.0, 0.5, 2.0]
    # input_tokens does not count the prefix; server_input_tokens counts all, with the template.
    assert workload.prompt_tokens.tolist() == [164, 164, 54]
    assert workload.priority[0] == -2  # vLLM's lower numbers are more urgent
    assert [workload.tenants[tenant] for tenant in workload.tenant] == ["gold", "free", "free"]
    prompts = [workload.content.prompt_ids(number, int(workload.prompt_tokens[number])) for number in range(3)]
    assert (prompts[0][:64] == prompts[1][:64]).all()
    assert (prompts[0][64:] != prompts[1][64:]).any()
    assert (prompts[2] != prompts[0][:54]).any()
    path.write_text(path.read_text().replace(",64,", ",-64,"))
    with pytest.raises(ConfigError, match="prefix_length is '-64', not a whole number from 0 on"):
        read_trace(path, "blis")


LOG = {"logger": "tokenyard.requests", "prompt_tokens": 9, "reason": "stop", "cause": ""}


def test_refused_requests_of_a_log_are_no_answers_of_one_token(tmp_path):
    served = [LOG | {"arrival_s": place, "output_tokens": 100 + place} for place in range(30)]
    refused = [
        LOG | {"arrival_s": 40 + place, "output_tokens": 0, "reason": "abort", "cause": "queue_full", "complete": False}
        for place in range(60)
    ]
    gone = [LOG | {"arrival_s": 200, "output_tokens": 119, "reason": "abort", "cause": "client_gone"}]
    wrong = [LOG | {"arrival_s": 201, "output_tokens": 0, "reason": "abort", "cause": "too_long"}]
    path = write_lines(tmp_path / "server.log", *served, *refused, *gone, *wrong)
    workload = read_trace(path, "tokenyard-log")
    assert (len(workload), workload.unknown_lengths) == (91, 61)
    assert set(workload.output_tokens[30:].tolist()) <= set(range(100, 130))
    assert workload.output_tokens[90] > 119
    assert workload.notes[0].startswith("1 requests that could never be served")
    assert workload.notes[1].startswith("61 of 91 answers were refused or broken off")
    skipped = read_trace(path, "tokenyard-log", ReadOptions(skip_unknown=True))
    assert (len(skipped), skipped.unknown_lengths) == (30, 0)
    assert "61 of 91 requests were refused or broken off and are left out" in skipped.notes


def test_a_log_of_refusals_alone_says_that_no_length_is_known(tmp_path):
    path = write_lines(tmp_path / "server.log", LOG | {"arrival_s": 1, "output_tokens": 0, "reason": "abort"})
    with pytest.raises(ConfigError, match="no length is known"):
        read_trace(path, "tokenyard-log")


def test_bad_lines_end_the_run_or_are_counted(tmp_path):
    bad = [GOOD | {"prompt_tokens": 0}, GOOD | {"output_tokens": "x"}, GOOD | {"deadline_s": -1.0, "priority": 3}]
    path = write_lines(tmp_path / "t.jsonl", GOOD, *bad, GOOD)
    path.write_text(path.read_text() + "cut off")
    with pytest.raises(ConfigError, match=r"line 2: a prompt of 0 tokens"):
        read_trace(path, "tokenyard")
    workload = read_trace(path, "tokenyard", ReadOptions(skip_bad=True))
    assert len(workload) == len(workload.deadline_s) == len(workload.priority) == 2
    assert len(workload.notes) == 1
    assert workload.notes[0].startswith("4 lines are left out; the first: t.jsonl, line 2: a prompt of 0")
    only_bad = write_lines(tmp_path / "b.jsonl", *bad)
    with pytest.raises(ConfigError, match="holds no request; 3 lines are left out"):
        read_trace(only_bad, "tokenyard", ReadOptions(skip_bad=True))


def test_a_client_without_its_data_set_can_be_left_out(tmp_path):
    for name in ("chunk-0", "chunk-1"):
        (tmp_path / f"{name}-trace.csv").write_text("0,0.05,1.0,Gamma,1.0,20.0\n")
    dataset = {"0": {"input_tokens": "{100: 1.0}", "output_tokens": "{20: 1.0}"}}
    (tmp_path / "chunk-0-dataset.json").write_text(json.dumps(dataset))
    with pytest.raises(ConfigError, match=r"no dataset\.json next to it"):
        read_trace(tmp_path, "servegen")
    workload = read_trace(tmp_path, "servegen", ReadOptions(skip_bad=True))
    assert len(workload) > 5
    assert workload.notes[0].startswith("1 of 2 clients are left out; the first: ")


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "azure"),
        ("b.csv", "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n", "burstgpt"),
        ("v.csv", "num_prefill_tokens,num_decode_tokens,pd_ratio\n", "vidur"),
        ("m.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 3, "hash_ids": [0]}\n', "mooncake"),
        ("s.log", 'a box\n{"logger": "x", "message": "y"}\n', "tokenyard-log"),
        ("l.log", json.dumps({"logger": "x", "message": "y", **GOOD}), "tokenyard-log"),
        ("o.jsonl", '{"timestamp": 1, "messages": []}\n', "openai-jsonl"),
        ("t.jsonl", json.dumps(GOOD), "tokenyard"),
    ],
)
def test_formats_are_recognised_by_their_first_lines(tmp_path, name, text, found):
    (tmp_path / name).write_text(text)
    assert detect_format(tmp_path / name) == found


@pytest.mark.parametrize(
    ("form", "first_line"),
    [
        *((form, json.dumps(dict.fromkeys(sorted(fields)))) for form in FORMATS for fields in form.fields),
        *((form, ",".join(form.columns).upper()) for form in FORMATS if form.columns),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_no_format_hides_another_with_more_fields(tmp_path, form, first_line):
    (tmp_path / "trace").write_text(f"{first_line}\n")
    assert detect_format(tmp_path / "trace") == form.name


def test_folders_and_archives_are_recognised_by_what_they_hold(tmp_path):
    for folder, name, text, found in (
        ("models", "chunk-0-trace.csv", "0,1,1,Gamma,1,1\n", "servegen"),
        ("sessions", "a.jsonl", '{"timestamp": 1, "input": "a", "output": "b", "session_id": "c"}\n', "lmcache-agent"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
        with tarfile.open(tmp_path / f"{folder}.tar.gz", "w:gz") as archive:
            archive.add(tmp_path / folder / name, name)
        assert detect_format(tmp_path / folder) == detect_format(tmp_path / f"{folder}.tar.gz") == found


def test_an_array_is_distinguished_from_lines(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([GOOD, GOOD]))
    with pytest.raises(ConfigError, match="one object a line"):
        detect_format(tmp_path / "a.json")


def test_a_file_that_is_not_recognised_asks_for_its_format(tmp_path):
    (tmp_path / "x.csv").write_text("when,in,out\n1,2,3\n")
    with pytest.raises(ConfigError, match="say which it is by --trace-format"):
        detect_format(tmp_path / "x.csv")


SPEC = """
version: "2"
aggregate_rate: 100.0
num_requests: 4000
clients:
  - {id: a, tenant_id: x, slo_class: batch, rate_fraction: 3, arrival: {process: gamma, cv: 2.0},
     prefix_group: system, prefix_length: 64, slo_target_us: 250000,
     input_distribution: {type: gaussian, params: {mean: 100, std_dev: 20, min: 50, max: 200}},
     output_distribution: {type: empirical, params: {10: 0.5, 20: 0.5}}}
  - {id: b, rate_fraction: 1, slo_class: critical, arrival: {process: poisson},
     input_distribution: {type: exponential, params: {mean: 300}},
     output_distribution: {type: constant, params: {value: 7}}}
"""


def test_requests_are_drawn_from_a_specification_of_blis(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    assert detect_format(path) == "blis-spec"
    workload = read_trace(path, "blis-spec")
    assert len(workload) == 4000
    assert workload.span_s == pytest.approx(40.0, rel=0.1)
    batch = np.array(workload.classes)[workload.service_class] == "batch"
    assert batch.mean() == pytest.approx(0.75, abs=0.03)
    assert workload.prompt_tokens[batch].min() >= 114
    assert workload.prompt_tokens[batch].mean() == pytest.approx(164, rel=0.02)
    assert workload.prompt_tokens[~batch].mean() == pytest.approx(300, rel=0.1)
    assert set(workload.output_tokens[batch]) == {10, 20}
    assert (workload.slo_ttft_s[batch] == 0.25).all()
    one, other = np.flatnonzero(batch)[:2]
    a, b = (workload.content.prompt_ids(i, 100) for i in (one, other))
    assert (a[:64] == b[:64]).all()
    assert (a[64:] != b[64:]).any()


def test_conversations_and_waiting_users_of_blis_are_closed_loops(tmp_path):
    path = tmp_path / "spec.yaml"
    talk = "reasoning: {multi_turn: {max_rounds: 3, think_time_us: 500000, context_growth: accumulate}}"
    path.write_text(SPEC.replace("slo_class: critical,", f"slo_class: critical, {talk},"))
    workload = read_trace(path, "blis-spec", ReadOptions(limit=300))
    sessions, turns = workload.sessions, np.bincount(workload.sessions.session)
    assert set(turns.tolist()) == {1, 3}
    first = np.flatnonzero(turns[sessions.session] == 3)[0]
    assert list(sessions.gap_s[first : first + 3]) == [0.0, 0.5, 0.5]
    assert (np.diff(workload.prompt_tokens[first : first + 3]) > 7).all(), "a prompt repeats what was said before"
    path.write_text(SPEC.replace("rate_fraction: 1,", "concurrency: 8, think_time_us: 1000,"))
    with pytest.raises(ConfigError, match="give a horizon"):
        read_trace(path, "blis-spec")
    path.write_text(
        SPEC.replace("rate_fraction: 1,", "concurrency: 8,").replace("rate_fraction: 3", "rate_fraction: 0")
    )
    users = read_trace(path, "blis-spec", ReadOptions(limit=80))
    assert np.bincount(users.sessions.session).tolist() == [10] * 8


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("process: gamma", "process: beta", "poisson"),
        ("rate_fraction: 3", "rate_fraktion: 3", "rate_fraction may be meant"),
        ("{mean: 300}", "{maen: 300}", "mean is missing"),
        ("10: 0.5, 20: 0.5", "10: -1, 20: 0.5", "at least 0"),
        ("num_requests: 4000", "horizon: 0", "neither num_requests nor horizon"),
        ("aggregate_rate: 100.0", "aggregate_rate: .nan", "aggregate_rate"),
        ("id: b,", "id: b, servegen: {},", "not modelled"),
        ("clients:", "clients: [", "not a YAML file"),
    ],
)
def test_a_bad_specification_of_blis_is_one_clear_line(tmp_path, before, after, complaint):
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC.replace(before, after))
    with pytest.raises(ConfigError, match=complaint) as error:
        read_trace(path, "blis-spec")
    assert "\n" not in error.value.message


def test_prompts_of_text_are_counted_and_their_arrivals_drawn(tmp_path):
    talk = [{"from": "human", "value": "how far is it"}, {"from": "gpt", "value": "four miles"}]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"id": "1", "conversations": talk}, {"id": "2", "conversations": talk[:1]}], indent=1))
    assert detect_format(path) == "prompts"
    workload = read_trace(path, "prompts", ReadOptions(tokenize=words))
    assert list(workload.prompt_tokens) == [4]
    assert list(workload.output_tokens) == [2]
    assert "1 conversations have no answer" in workload.remarks[0]
    own = write_lines(
        tmp_path / "own.jsonl",
        {"prompt": "a b c", "output_tokens": 9},
        {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 5},
        {"question": "why not", "answer": "no time left"},
    )
    assert detect_format(own) == "prompts"
    assert list(read_trace(own, "prompts", ReadOptions(tokenize=words)).output_tokens) == [9, 5, 3]
    with pytest.raises(ConfigError, match="how long the answer is"):
        read_trace(write_lines(tmp_path / "bare.jsonl", {"prompt": "a"}), "prompts", ReadOptions(tokenize=words))
