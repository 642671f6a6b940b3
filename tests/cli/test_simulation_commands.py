"""The commands simulate, compare and goodput, through their own parsers."""

import argparse
import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tokenyard.base import ConfigError
from tokenyard.cli.compare import add_compare_arguments, run_compare
from tokenyard.cli.flags import Parser
from tokenyard.cli.goodput import add_goodput_arguments, run_goodput
from tokenyard.cli.main import main
from tokenyard.cli.simulate import add_simulate_arguments, run_simulate
from tokenyard.cli.simulation_arguments import load_tokenizer, load_workload, make_setup, print_outcomes
from tokenyard.config import DEMO_MODEL
from tokenyard.cost import get_profile, save_profile
from tokenyard.sim.report.summary import summary
from tokenyard.sim.simulate import simulate
from tokenyard.sim.traces.synthetic import synthetic

SMALL = ["--synthetic", "plain", "--limit", "60", "--request-rate", "20"]


def parse(add_arguments, *argv: str) -> argparse.Namespace:
    parser = Parser()
    add_arguments(parser)
    return parser.parse_strictly(argv)


def simulate_args(*argv: str) -> argparse.Namespace:
    return parse(add_simulate_arguments, *argv)


def test_simulate_writes_numbers_report_and_steps(tmp_path, capsys):
    out, report, steps = tmp_path / "o.json", tmp_path / "r.html", tmp_path / "p.json"
    outputs = ["--json", str(out), "--report", str(report), "--perfetto", str(steps)]
    assert run_simulate(simulate_args(*SMALL, "--preset", "sglang-default", "--bound", *outputs)) == 0
    numbers = json.loads(out.read_text())
    assert numbers["requests"] == 60
    assert numbers["bound_slo_attainment"] >= numbers["slo_attainment"]
    assert "data-chart" in report.read_text()
    assert json.loads(steps.read_text())["traceEvents"]
    assert "SLO attainment" in capsys.readouterr().out


@pytest.mark.slow
def test_adaptive_reports_its_changes_and_refuses_wrong_candidates(tmp_path):
    out, words = tmp_path / "o.json", ["--schedule-policy", "adaptive", "--policy-options"]
    rush = ["--synthetic", "plain", "--request-rate", "30", "--limit", "400", "--quiet"]
    assert run_simulate(simulate_args(*rush, *words, "among=fcfs+slo,interval_s=3", "--json", str(out))) == 0
    changes = json.loads(out.read_text())["policy_changes"]
    assert [change["candidate"] for change in changes] == ["slo"]
    with pytest.raises(ConfigError, match="did you mean slo"):
        run_simulate(simulate_args(*rush, *words, "among=slow"))


def test_a_narrow_terminal_gets_several_tables_and_every_figure(monkeypatch, capsys):
    outcome = simulate(
        synthetic("plain", 40, 20.0), make_setup(simulate_args(*SMALL), synthetic("plain", 40, 20.0), None)
    )
    numbers = {f"setting-{place}": summary(outcome) for place in range(5)}
    pages = {}
    for columns in (40, 80, 300):
        monkeypatch.setenv("COLUMNS", str(columns))
        print_outcomes(numbers)
        pages[columns] = capsys.readouterr().out
    assert [page.count("decision hash") for page in pages.values()] == [5, 2, 1]
    for page in pages.values():
        assert all(name in page for name in numbers)
        assert page.count(summary(outcome)["decision_hash"][:12]) == 5


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--schedule-policy", "lpm", "--disable-radix-cache"], "using fcfs"),
        (["--schedule-policy", "fcfs"], ""),
    ],
)
def test_a_policy_that_was_replaced_is_reported(tmp_path, capsys, flags, words):
    out, report = tmp_path / "o.json", tmp_path / "r.html"
    assert run_simulate(simulate_args(*SMALL, *flags, "--json", str(out), "--report", str(report))) == 0
    assert words in json.loads(out.read_text())["policy_note"]
    assert ("note: " in capsys.readouterr().out) == ("Note on " in report.read_text()) == bool(words)


def test_quiet_says_nothing(capsys):
    assert run_simulate(simulate_args(*SMALL, "--preset", "vllm-default", "--quiet")) == 0
    assert capsys.readouterr().out == ""


def test_flags_win_over_the_preset_and_the_preset_over_the_defaults():
    args = simulate_args(*SMALL, "--preset", "vllm-default", "--chunked-prefill-size", "512", "--enable-prefix-caching")
    settings = make_setup(args, load_workload(args), "vllm-default").settings
    assert (settings.chunked_prefill_size, settings.enable_mixed_chunk) == (512, True)
    assert not settings.disable_radix_cache


def test_without_a_preset_the_servers_own_settings_are_simulated():
    args = simulate_args(*SMALL, "--max-total-tokens", "64k", "--overlap", "--host-us", "150")
    setup = make_setup(args, load_workload(args), None)
    assert setup.settings.max_running_requests == 256
    assert setup.settings.max_in_flight == 2
    assert setup.kv_pool_tokens == 64_000
    assert setup.host_s == pytest.approx(150e-6)


def test_targets_and_headroom_reach_the_scheduler_and_the_judge():
    urgent = ["--schedule-policy", "slo", "--slo-max-wait-s", "58", "--slo-ttft-ms", "500"]
    args = simulate_args(*SMALL, *urgent, "--slo-tpot-ms", "40", "--headroom", "past-future")
    setup = make_setup(args, load_workload(args), None)
    settings = setup.settings
    assert (settings.slo_max_wait_s, settings.slo_reject, settings.headroom) == (58.0, False, "past-future")
    assert (setup.slo.ttft_s, setup.slo.ttft_scale, setup.slo.tpot_s) == (0.5, 5.0, 0.04)


def test_every_preset_and_flag_that_matters_changes_the_plans(tmp_path):
    hashes = set()
    for extra in ([], ["--headroom", "ratio"], ["--max-running-requests", "8"], ["--preset", "vllm-default"]):
        out = tmp_path / "o.json"
        tight = ["--synthetic", "plain", "--limit", "60", "--request-rate", "60", "--max-total-tokens", "24k"]
        argv = [*tight, "--headroom", "history", *extra, "--json", str(out), "--quiet"]
        assert run_simulate(simulate_args(*argv)) == 0
        hashes.add(json.loads(out.read_text())["decision_hash"])
        out.unlink()
    assert len(hashes) == 4


def test_a_profile_file_takes_the_place_of_device_and_model(tmp_path):
    save_profile(get_profile("a100", "llama-2-7b"), tmp_path / "p.json")
    args = simulate_args(*SMALL, "--profile", str(tmp_path / "p.json"))
    assert make_setup(args, load_workload(args), None).profile.name == "a100/llama-2-7b"


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "either --trace FILE or --synthetic"),
        ([*SMALL, "--trace", "x"], "either --trace FILE or --synthetic"),
        ([*SMALL, "--device", "abacus"], "no data sheet of device"),
        ([*SMALL, "--rate-scale", "-1"], "--rate-scale"),
        ([*SMALL, "--slo-tpot-ms", "0"], "^--slo-tpot-ms|^SLO targets"),
        ([*SMALL, "--schedule-policy", "fcsf"], "no schedule policy"),
        ([*SMALL, "--chunked-prefill-size", "7"], "--chunked-prefill-size"),
        ([*SMALL, "--json", "nowhere/o.json"], "--json nowhere/o.json is in a folder"),
        ([*SMALL, "--report", "/"], "--report / is a folder"),
        ([*SMALL, "--json", "o", "--report", "./o"], "another file of this run"),
        (["--trace", "t.jsonl", "--tape", "t.jsonl"], "another file of this run"),
        ([*SMALL, "--seed", "-1"], "--seed"),
        ([*SMALL, "--host-us", "-1"], "--host-us"),
        ([*SMALL, "--replicas", "0"], "--replicas"),
        ([*SMALL, "--dp-size", "-1"], "--dp-size"),
        ([*SMALL, "--replicas", "5000"], "at most 4096"),
        ([*SMALL, "--fleet", "nowhere.yaml"], "--fleet nowhere.yaml"),
        ([*SMALL, "--host-us", "inf"], "--host-us"),
        ([*SMALL, "--context-length", "0"], "--context-length is 0"),
        ([*SMALL, "--max-total-tokens", str(10**20)], "--max-total-tokens"),
        ([*SMALL, "--max-running-requests", "-1"], "--max-running-requests is -1"),
        ([*SMALL, "--max-running-requests", str(10**20)], "--max-running-requests"),
        ([*SMALL, "--page-size", "0"], "--page-size is 0"),
        ([*SMALL, "--kv-events-endpoint", "x"], "--kv-events-endpoint"),
        ([*SMALL, "--rate-scale", "1e-12"], "after the first"),
        ([*SMALL, "--cost-error", "-1"], "--cost-error"),
        ([*SMALL, "--request-rate", "inf"], "--request-rate"),
    ],
)
def test_wrong_arguments_are_one_clear_line(argv, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        run_simulate(simulate_args("--quiet", *argv))
    assert "\n" not in caught.value.message


def test_compare_runs_settings_side_by_side(tmp_path, capsys):
    out, report = tmp_path / "o.json", tmp_path / "r.html"
    argv = ["sglang-default", "fcfs", *SMALL, "--jobs", "2", "--json", str(out), "--report", str(report)]
    assert run_compare(parse(add_compare_arguments, *argv)) == 0
    numbers = json.loads(out.read_text())
    assert list(numbers) == ["sglang-default", "fcfs"]
    assert all(one["finished"] == 60 for one in numbers.values())
    assert "sglang-default" in report.read_text()
    shown = capsys.readouterr().out
    assert "fcfs" in shown
    assert "columns differ in --disable-radix-cache: True for sglang-default; False for fcfs" in shown
    assert "--schedule-policy:" not in shown


def test_a_fleet_shows_each_of_its_workers(tmp_path, capsys):
    (tmp_path / "f.yaml").write_text("{routers: 2, events: [{at_s: 1, kill: 1, for_s: 1}]}")
    out = tmp_path / "o.json"
    fleet = ["--replicas", "2", "--dp-size", "2", "--router", "predicted_ttft", "--fleet", str(tmp_path / "f.yaml")]
    assert run_simulate(simulate_args(*SMALL, *fleet, "--json", str(out))) == 0
    workers = json.loads(out.read_text())["workers"]
    assert [row["name"] for row in workers] == ["r0@0", "r0@1", "r1@0", "r1@1"]
    assert [row["restarts"] for row in workers] == [0, 0, 1, 1]
    shown = capsys.readouterr().out
    assert "workers by predicted_ttft, 2 routers" in shown
    assert "r1@1" in shown
    assert run_compare(parse(add_compare_arguments, "fcfs", "slo", *SMALL, *fleet, "--jobs", "1")) == 0
    assert "slo: workers by" in capsys.readouterr().out


@pytest.mark.slow
def test_the_oracle_is_shown_apart(tmp_path, capsys):
    out, report = tmp_path / "o.json", tmp_path / "r.html"
    tight = ["--synthetic", "plain", "--limit", "50", "--request-rate", "60", "--max-total-tokens", "12k"]
    outputs = ["--json", str(out), "--report", str(report)]
    assert run_simulate(simulate_args(*tight, "--oracle", *outputs)) == 0
    numbers = json.loads(out.read_text())
    assert numbers["oracle"]["decision_hash"] != numbers["decision_hash"]
    assert numbers["oracle"]["preemptions"] == 0
    assert "fcfs, oracle" in capsys.readouterr().out
    assert "fcfs, oracle" in report.read_text()
    assert run_simulate(simulate_args(*tight, "--json", str(out), "--quiet")) == 0
    assert json.loads(out.read_text())["decision_hash"] == numbers["decision_hash"]
    argv = ["vllm-default", "short-first", *tight, "--oracle", "--json", str(out), "--quiet"]
    assert run_compare(parse(add_compare_arguments, *argv)) == 0
    compared = json.loads(out.read_text())
    assert list(compared) == ["vllm-default", "short-first", "vllm-default, oracle", "short-first, oracle"]
    hashes = [one["decision_hash"] for one in compared.values()]
    assert hashes[0] == hashes[2]
    assert hashes[1] != hashes[3]


@pytest.mark.slow
def test_compare_names_what_is_wrong_with_one_of_its_settings():
    with pytest.raises(ConfigError, match="no schedule policy 'nonsense'"):
        run_compare(parse(add_compare_arguments, "fcfs", "nonsense", *SMALL, "--quiet"))
    with pytest.raises(ConfigError, match="as names"):
        run_compare(parse(add_compare_arguments, "fcfs", "--preset", "sarathi", *SMALL))


def test_goodput_finds_a_load_and_draws_its_curve(tmp_path, capsys):
    out, report = tmp_path / "o.json", tmp_path / "r.html"
    argv = ["sglang-default", "--synthetic", "plain", "--limit", "150", "--tolerance", "0.2", "--targets", "0.9"]
    argv += ["--json", str(out), "--report", str(report), "--max-wait-s", "60"]
    assert run_goodput(parse(add_goodput_arguments, *argv)) == 0
    document = json.loads(out.read_text())
    scale = document["largest_scale"]["sglang-default"]["0.9"]
    points = dict(map(tuple, document["points"]["sglang-default"]))
    assert points[scale]["slo_attainment"] >= 0.9
    assert any(run["slo_attainment"] < 0.9 for at, run in points.items() if at > scale)
    assert "90 %" in report.read_text()
    assert "90 %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "values"),
    [("--tolerance", ["0", "nan", "inf"]), ("--max-rejected", ["-1", "nan", "2"]), ("--max-wait-s", ["-1", "nan"])],
)
def test_goodput_refuses_a_search_that_can_find_nothing(flag, values):
    for value in values:
        with pytest.raises(ConfigError, match=f"^{flag} is"):
            run_goodput(parse(add_goodput_arguments, "fcfs", *SMALL, flag, value))


def test_goodput_refuses_targets_that_are_no_shares():
    with pytest.raises(ConfigError, match="--targets"):
        run_goodput(parse(add_goodput_arguments, "fcfs", *SMALL, "--targets", "90"))


def test_a_tokenizer_folder_or_a_clear_line(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tokenizer(tmp_path)
    if not (DEMO_MODEL / "tokenizer.json").is_file():
        pytest.skip("the demo model is not there")
    assert len(load_tokenizer(DEMO_MODEL)("hello there")) > 0


@pytest.mark.part(3)
@pytest.mark.parametrize("command", ["simulate", "compare", "goodput"])
def test_the_commands_are_on_the_command_line(command, tmp_path, capsys):
    names = [] if command == "simulate" else ["sglang-default"]
    out = tmp_path / "o.json"
    argv = [command, *names, "--synthetic", "plain", "--limit", "150", "--json", str(out), "--quiet"]
    assert main([*argv, "--tolerance", "0.5"] if command == "goodput" else argv) == 0
    assert json.loads(out.read_text())
    assert main([*argv, "--trace", "x"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_guides_own_policy_runs_from_the_folder_it_lies_in(tmp_path, monkeypatch):
    guide = (Path(__file__).resolve().parents[2] / "docs/your_own_policy.md").read_text()
    (tmp_path / "my_policies.py").write_text(guide.split("```python\n")[1].split("```")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])
    argv = ["--synthetic", "multi-turn", "--limit", "20", "--quiet"]
    assert main(["simulate", *argv, "--schedule-policy", "my_policies:WarmFirst"]) == 0
    assert main(["compare", *argv, "fcfs", "my_policies:WarmFirst"]) == 0


def test_help_can_be_searched(capsys):
    assert main(["simulate", "--help", "perfetto"]) == 0
    shown = capsys.readouterr().out
    assert "--perfetto" in shown
    assert "--trace-format" not in shown


def test_goodput_takes_no_preset_flag_and_no_tolerance_of_nothing():
    for extra, complaint in ((["--preset", "sarathi"], "as names"), (["--tolerance", "0"], "--tolerance")):
        with pytest.raises(ConfigError, match=complaint):
            run_goodput(parse(add_goodput_arguments, "fcfs", *SMALL, *extra))


def test_a_user_policy_that_raises_fails_the_run_with_its_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "raising_policies.py").write_text(
        "from tokenyard.policy import Policy\n\n\nclass Raising(Policy):\n    def order(self, views):\n"
        "        yield from views.waiting.tolist()\n        raise ValueError('not today')\n"
    )
    monkeypatch.chdir(tmp_path)
    argv = ["--synthetic", "plain", "--limit", "50", "--quiet"]
    policy = "raising_policies:Raising"
    for names in (["simulate", "--replicas", "2", "--schedule-policy", policy], ["compare", policy]):
        assert main([*names, *argv]) == 2
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1
        assert "raising_policies:Raising failed: it raised ValueError('not today')" in printed
        assert "raising_policies.py, line 7 (order)" in printed


def test_a_poor_fit_makes_the_prediction_a_warning(tmp_path, capsys):
    report = tmp_path / "r.html"
    for error, warned in ((0.31, True), (0.05, False), (None, False)):
        save_profile(replace(get_profile("cpu", "demo"), error=error), tmp_path / "p.json")
        argv = ["simulate", *SMALL, "--profile", str(tmp_path / "p.json"), "--report", str(report)]
        assert main(argv) == 0
        printed = "the cost model cpu/demo is off by 31 %"
        assert (f"WARNING: {printed}" in capsys.readouterr().out) is warned
        assert (printed in report.read_text()) is warned


def test_what_was_left_out_is_below_the_table_and_in_the_report(tmp_path, capsys):
    lines = [{"arrival_s": place, "prompt_tokens": 50, "output_tokens": 9} for place in range(40)]
    lines += [{"arrival_s": 40, "prompt_tokens": 0, "output_tokens": 9}]
    lines += [{"arrival_s": 41, "prompt_tokens": 50, "output_tokens": 0, "complete": False}]
    trace, out, report = tmp_path / "t.jsonl", tmp_path / "o.json", tmp_path / "r.html"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["simulate", "--trace", str(trace), "--quiet"]) == 2
    assert "line 41: a prompt of 0 tokens" in capsys.readouterr().err
    argv = ["simulate", "--trace", str(trace), "--bad-lines", "skip", "--json", str(out), "--report", str(report)]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    for words in ("t.jsonl is read as tokenyard", "1 lines are left out", "1 of 41 answers were refused or broken off"):
        assert words in shown
        assert words in report.read_text()
    assert "length unknown, drawn" in shown
    assert json.loads(out.read_text())["unknown_lengths"] == 1


def test_prompts_beyond_the_models_context_are_refused_and_counted(tmp_path, capsys):
    trace, out = tmp_path / "t.jsonl", tmp_path / "o.json"
    lines = [{"arrival_s": 0, "prompt_tokens": tokens, "output_tokens": 4} for tokens in (500, 140_000, 426_990)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["--trace", str(trace), "--trace-format", "tokenyard", "--json", str(out), "--max-total-tokens", "2000000"]
    assert run_simulate(simulate_args(*argv)) == 0
    assert json.loads(out.read_text())["rejected"] == 2
    assert "note: 2 prompts do not fit the context of 131072 tokens" in capsys.readouterr().out
    assert run_simulate(simulate_args(*argv, "--context-length", "200000", "--quiet")) == 0
    assert json.loads(out.read_text())["rejected"] == 1


def session_folder(tmp_path, sessions=6):
    """Sessions of kv-cache-tester, the last one with a turn of 150,000 tokens."""
    for place in range(sessions):
        turns = [640, 1280, 150_000 if place == sessions - 1 else 1920]
        requests = [
            {"type": "n", "in": tokens, "out": 4, "hash_ids": list(range(tokens // 64)), "think_time": 3.0 * bool(turn)}
            for turn, tokens in enumerate(turns)
        ]
        session = {"id": f"s{place}", "block_size": 64, "hash_id_scope": "local", "requests": requests}
        (tmp_path / f"s{place}.json").write_text(json.dumps(session))
    return ["--trace", str(tmp_path), "--trace-format", "kv-cache-tester"]


def test_sessions_of_a_trace_run_as_closed_loops(tmp_path, capsys):
    (tmp_path / "trace").mkdir()
    argv, out = session_folder(tmp_path / "trace"), tmp_path / "o.json"
    words = "--concurrent-sessions 2 --sessions 4 --think-cap-s 600 --device h100 --model llama-3-70b-tp8"
    assert run_simulate(simulate_args(*argv, *words.split(), "--max-total-tokens", "1200000", "--json", str(out))) == 0
    figures = json.loads(out.read_text())["sessions"]
    assert figures["finished"] == 4
    assert {"turns_per_hour", "mean_session_s", "longest_wait_s", "hit_share", "recomputed_tokens"} <= figures.keys()
    assert figures["hit_share"] == pytest.approx((640 + 1280) / (640 + 1280 + 1920), abs=1e-3)
    told = capsys.readouterr().out
    assert "1 of 6 sessions need a context longer than 131072 tokens and are left out" in told
    assert "in 4 sessions on" in told
    assert main(["compare", "fcfs", "lpm", *argv, "--concurrent-sessions", "3", "--json", str(out), "--quiet"]) == 0
    assert [one["sessions"]["finished"] for one in json.loads(out.read_text()).values()] == [5, 5]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--synthetic plain --concurrent-sessions 2", "has no sessions"),
        ("--trace sessions --trace-format kv-cache-tester", "does not say when its sessions start"),
        ("--trace sessions --trace-format kv-cache-tester --concurrent-sessions 2 --sessions 9", "has 5 sessions"),
    ],
)
def test_sessions_that_cannot_run_are_one_clear_line(tmp_path, monkeypatch, words, complaint):
    (tmp_path / "sessions").mkdir()
    session_folder(tmp_path / "sessions")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=complaint):
        run_simulate(simulate_args(*words.split()))


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("plan --concurrent-sessions 2", "run simulate at several values of --replicas"),
        ("plan --sessions-per-hour 60", "run simulate at several values of --replicas"),
        ("goodput fcfs --concurrent-sessions 2", "give --sessions-per-hour R"),
    ],
)
def test_searches_refuse_sessions_that_they_cannot_redraw_and_say_what_to_use(tmp_path, capsys, command, complaint):
    assert main([*command.split(), *session_folder(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line


def test_goodput_of_sessions_counts_sessions_per_hour(tmp_path, capsys):
    (tmp_path / "trace").mkdir()
    words = (
        "--sessions-per-hour 3600 --long-sessions cut --targets 0.5 --tolerance 0.5 --slo-ttft-ms 30 --slo-ttft-scale 0"
    )
    argv = [*session_folder(tmp_path / "trace"), *words.split(), "--report", str(tmp_path / "r.html")]
    assert main(["goodput", "fcfs", *argv]) == 0
    assert "(sessions/h)" in capsys.readouterr().out
    page = (tmp_path / "r.html").read_text()
    assert "sessions/h" in page
    assert "requests/s" not in page


@pytest.mark.slow
def test_several_seeds_give_intervals_and_a_row_per_request(tmp_path, capsys):
    out, table = tmp_path / "o.json", tmp_path / "requests.csv"
    argv = ["fcfs", "slo", *SMALL, "--jobs", "1", "--seeds", "2", "--json", str(out), "--requests-out", str(table)]
    assert run_compare(parse(add_compare_arguments, *argv)) == 0
    numbers = json.loads(out.read_text())["slo"]
    hashes = [one["decision_hash"] for one in numbers["seeds"]]
    assert hashes[0] == numbers["decision_hash"] != hashes[1]
    p50 = [one["ttft_s"]["p50"] for one in numbers["seeds"]]
    assert numbers["intervals"]["ttft_s"]["p50"]["mean"] == pytest.approx(sum(p50) / 2)
    assert "beyond fcfs" in capsys.readouterr().out
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["setting"], row["seed"]) for row in rows} == {(n, s) for n in ("fcfs", "slo") for s in "01"}
    assert len(rows) == 4 * 60

    only = tmp_path / "only.json"
    args = simulate_args(*SMALL, "--seed", "1", "--schedule-policy", "slo", "--json", str(only), "--quiet")
    assert run_simulate(args) == 0
    assert json.loads(only.read_text())["decision_hash"] == hashes[1]


def test_goodput_searches_with_each_seed(tmp_path, capsys):
    out = tmp_path / "o.json"
    argv = ["fcfs", "--synthetic", "plain", "--limit", "60", "--tolerance", "0.4", "--targets", "0.9"]
    assert run_goodput(parse(add_goodput_arguments, *argv, "--seeds", "2", "--json", str(out))) == 0
    document = json.loads(out.read_text())
    scales = document["seeds"]["fcfs"]["0.9"]
    assert len(scales) == 2
    assert document["largest_scale"]["fcfs"]["0.9"] == scales[0]
    assert document["intervals"]["fcfs"]["0.9"]["mean"] == pytest.approx(sum(scales) / 2)
    assert "mean of 2 seeds" in " ".join(capsys.readouterr().out.split())


def test_a_table_that_cannot_be_written_is_refused_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="pyarrow"):
        run_simulate(simulate_args(*SMALL, "--requests-out", str(tmp_path / "r.arrow")))
    with pytest.raises(ConfigError, match=r"none of the endings \.csv, \.arrow"):
        run_simulate(simulate_args(*SMALL, "--requests-out", str(tmp_path / "r.xyz")))
    with pytest.raises(ConfigError, match="--seeds is 0"):
        run_simulate(simulate_args(*SMALL, "--seeds", "0"))
