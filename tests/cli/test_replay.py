"""The command replay, from a tape of an LLM in this process to a comparison."""

import json

import pytest

from tokenyard.base import SamplingParams
from tokenyard.cli.main import main
from tokenyard.cost import get_profile, save_profile
from tokenyard.offline import LLM
from tokenyard.sim.traces.formats import read_trace
from tokenyard.sim.traces.read_options import ReadOptions


@pytest.fixture(scope="module")
def tape(tmp_path_factory):
    path = tmp_path_factory.mktemp("tape") / "a.tape"
    options = {"mock_step_ms": 1.0, "max_total_tokens": 2048, "max_running_requests": 4, "record": str(path)}
    with LLM(executor="mock", skip_tokenizer_init=True, decode_log_interval=0, **options) as llm:
        sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
        llm.generate([[5] * 30 + [10 + number] * 9 for number in range(24)], sampling)
    return path


def run(capsys, *argv):
    status = main(["replay", *map(str, argv)])
    found = capsys.readouterr()
    return status, found.out, found.err


def test_a_tape_replays(tape, capsys):
    status, out, _ = run(capsys, tape)
    assert status == 0
    plans = out.split(" records over ")[1].split("; ")[1].split()
    assert plans[0] == plans[2]
    assert int(plans[0]) > 50
    assert "anonymized" in out


def test_a_difference_is_shown_and_is_a_failure(tape, tmp_path, capsys):
    data = bytearray(tape.read_bytes())
    place = data.index(b"\xb4max_running_requests") + 21
    data[place] = 2
    (tmp_path / "b.tape").write_bytes(data)
    status, out, _ = run(capsys, tmp_path / "b.tape", "--to-trace", tmp_path / "t.jsonl")
    assert status == 1
    assert "the first difference is at record" in out
    assert "tape: step" in out
    assert not (tmp_path / "t.jsonl").exists()


def test_a_truncated_tape_says_so(tape, tmp_path, capsys):
    (tmp_path / "c.tape").write_bytes(tape.read_bytes()[:-3])
    status, out, _ = run(capsys, tmp_path / "c.tape")
    assert status == 0
    assert "cut off" in out


def test_other_settings_and_devices_are_simulated_next_to_what_happened(tape, tmp_path, capsys):
    numbers, trace, profile = tmp_path / "n.json", tmp_path / "t.jsonl", tmp_path / "p.json"
    save_profile(get_profile("cpu", "demo"), profile)
    flags = ["--max-running-requests", "1", "--schedule-policy", "lpm", "--disable-overlap-schedule"]
    status, out, _ = run(capsys, tape, *flags, "--json", numbers, "--to-trace", trace)
    assert status == 0
    found = json.loads(numbers.read_text())
    assert list(found) == ["on the tape", "simulated", "what if"]
    assert {one["finished"] for one in found.values()} == {24}
    assert 0.0 < found["simulated"]["e2e_s"]["p50"] < float("inf")
    assert found["what if"]["e2e_s"]["max"] > 1.5 * found["simulated"]["e2e_s"]["max"]
    assert found["what if"]["policy"] == "lpm"
    assert "fitted to the tape" in out
    assert len(read_trace(trace, "tokenyard", ReadOptions())) == 24
    run(capsys, tape, "--profile", profile, "--json", numbers)
    assert json.loads(numbers.read_text())["what if"]["profile"] == "cpu/demo"


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--port", "5"], "--port does not change"),
        (["--config", "x.yaml"], "not in a --config file"),
        (["--schedule-policy", "fcsf"], "no schedule policy"),
        (["--profile", "abacus/llama"], "no cost profile"),
        (["--chunked-prefill-size", "0"], "--chunked-prefill-size"),
    ],
)
def test_wrong_arguments_are_one_clear_line(tape, capsys, argv, complaint):
    status, _, err = run(capsys, tape, *argv)
    assert status == 2
    assert complaint in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--json", "n.json"], "give scheduler flags or --profile"),
        (["--to-trace", "absent/t.jsonl"], "is in a folder that does not exist"),
        (["--profile", "cpu/demo", "--json", "."], "is a folder"),
    ],
)
def test_outputs_that_cannot_be_are_refused_before_the_work(tape, capsys, argv, complaint):
    status, out, err = run(capsys, tape, *argv)
    assert (status, out) == (2, "")
    assert complaint in err


def test_a_missing_or_foreign_file_is_one_clear_line(tmp_path, capsys):
    (tmp_path / "x").write_text("hello")
    for path, complaint in ((tmp_path / "nothing", "cannot read"), (tmp_path / "x", "is not a tape")):
        status, _, err = run(capsys, path)
        assert (status, err.count("\n")) == (2, 1)
        assert complaint in err
