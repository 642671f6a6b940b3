"""The Python API: `tokenyard.sim`."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

import tokenyard.sim
from tests.sim.small_workloads import workload
from tokenyard.base import ConfigError
from tokenyard.policy import Policy
from tokenyard.sim import Engine, Fault, Fleet, Hardware, Interval, run, sweep, synthetic, trace, write_report
from tokenyard.sim.report.intervals import interval, over_seeds
from tokenyard.sim.simulate import simulate


class LongestFirst(Policy):
    name = "longest-first"

    def order(self, views):
        return iter(sorted(views.waiting.tolist(), key=lambda row: -views.columns.prompt_tokens[row]))


def test_every_public_name_exists():
    assert all(getattr(tokenyard.sim, name) is not None for name in tokenyard.sim.__all__)
    with pytest.raises(AttributeError):
        tokenyard.sim.nothing  # noqa: B018


def test_a_run_has_the_figures_and_columns_of_its_requests(tmp_path):
    result = run(workload((0.0, 400, 20), (0.1, 800, 1), (0.2, 90_000, 5)), Engine(context_length=40_000))
    columns = result.columns
    assert len({len(column) for column in columns.values()}) == 1
    assert columns["status"].tolist() == ["finished", "finished", "rejected"]
    assert columns["completion_tokens"].tolist()[:2] == [20, 1]
    assert np.isnan(columns["ttft_s"][2])
    assert columns["engine"].tolist() == [0, 0, 0]
    np.testing.assert_allclose(columns["first_token_s"][:2] - columns["arrival_s"][:2], columns["ttft_s"][:2])
    assert result["slo_attainment"] == pytest.approx(2 / 3, abs=1e-6)
    assert result["ttft_s.mean"] == pytest.approx(columns["ttft_s"][:2].mean(), abs=1e-6)
    with pytest.raises(KeyError, match="p50"):
        result["ttft_s.p12"]
    assert "SLO attainment" in str(result)
    result.save(tmp_path / "requests.csv")
    rows = list(csv.DictReader((tmp_path / "requests.csv").open()))
    assert [row["status"] for row in rows] == columns["status"].tolist()
    assert rows[2]["ttft_s"] == ""
    assert float(rows[0]["ttft_s"]) == pytest.approx(columns["ttft_s"][0], abs=1e-9)
    write_report(tmp_path / "page.html", {"one": result, "two": result})
    assert "two" in (tmp_path / "page.html").read_text()


def test_an_engine_is_what_the_command_line_makes(tmp_path):
    traffic = synthetic("multi-turn", 80, 8.0)
    result = run(traffic, Engine(policy="slo", kv_pool_tokens=200_000, settings={"headroom": "none"}), replicas=2)
    setup = result.outcome.setup
    assert (setup.replicas, setup.settings.headroom, setup.settings.schedule_policy) == (2, "none", "slo")
    assert simulate(traffic, setup).decision_hash == result.outcome.decision_hash
    again = run(traffic, Engine().with_(policy="slo", kv_pool_tokens=200_000, headroom="none"), replicas=2)
    assert again.outcome.decision_hash == result.outcome.decision_hash


def test_wrong_names_are_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean headroom"):
        run(synthetic("plain", 5), Engine().with_(headrom="none"))
    with pytest.raises(ConfigError, match="top of a module"):
        run(synthetic("plain", 5), Engine(policy=type("Mine", (LongestFirst,), {"__qualname__": "f.<locals>.Mine"})))


def test_a_policy_may_be_a_class_and_a_fleet_has_faults():
    busy = workload(*((0.001 * n, 200 + 50 * n, 4) for n in range(60)))
    own, usual = run(busy, Engine(policy=LongestFirst)), run(busy)
    assert own.name == "tests.sim.test_python_api:LongestFirst"
    assert own.columns["ttft_s"][-1] < usual.columns["ttft_s"][-1]
    fleet = run(busy, replicas=2, router="shortest_queue", fleet=Fleet(faults=(Fault(0.02, 1, 1e9),)))
    assert set(fleet.columns["engine"]) == {0}


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_sweep_continues_from_its_folder(tmp_path, jobs):
    drawn = []

    def traffic(seed):
        drawn.append(seed)
        return synthetic("plain", 40, 20.0, seed)

    over = {"policy": ["fcfs", LongestFirst], "rate_scale": [1.0, 4.0]}
    found = sweep(traffic, over=over, seeds=2, jobs=jobs, folder=tmp_path, progress=False)
    assert drawn == [0, 1]
    file = tmp_path / "runs.jsonl"
    lines = file.read_text().splitlines()
    assert len(found.runs) == len(lines) == 8
    alone = run(synthetic("plain", 40, 20.0, 1).scaled(4.0), Engine(policy=LongestFirst), seed=1)
    assert found.runs[-1].summary["decision_hash"] == alone.summary["decision_hash"]

    # One line is lost, one is cut off: only these two run again.
    file.write_text("\n".join(lines[:6]) + "\n" + lines[6][:40])
    again = sweep(traffic, over=over, seeds=2, jobs=jobs, folder=tmp_path, progress=False)
    assert [one.summary["decision_hash"] for one in again.runs] == [one.summary["decision_hash"] for one in found.runs]
    kept = file.read_text().splitlines()
    assert kept[:6] == lines[:6]
    assert len(kept) == 8
    assert {json.loads(line)["key"] for line in kept} == {json.loads(line)["key"] for line in lines}

    rows = found.table("ttft_s.p99")
    assert [(row["policy"].split(":")[-1], row["rate_scale"]) for row in rows] == [
        ("fcfs", 1.0),
        ("fcfs", 4.0),
        ("LongestFirst", 1.0),
        ("LongestFirst", 4.0),
    ]
    assert all(row["ttft_s.p99.low"] <= row["ttft_s.p99"] <= row["ttft_s.p99.high"] for row in rows)
    one = found.interval("ttft_s.p99", policy=LongestFirst, rate_scale=4.0)
    assert one.mean == rows[3]["ttft_s.p99"]
    with pytest.raises(KeyError, match="2 combinations"):
        found.interval("ttft_s.p99", policy="fcfs")
    assert "4 combinations x 2 seeds" in str(found)


def test_differences_are_paired_by_seed():
    found = sweep(synthetic("plain", 60, 25.0), over={"policy": ["fcfs", "slo"]}, seeds=3, jobs=1, progress=False)
    values = {one.parameters["policy"]: [] for one in found.runs}
    for one in found.runs:
        values[one.parameters["policy"]].append(one.summary["ttft_s"]["p50"])
    assert len(set(values["fcfs"])) == 3
    expected = interval([ours - base for ours, base in zip(values["slo"], values["fcfs"], strict=True)])
    assert found.difference("ttft_s.p50", {"policy": "slo"}, {"policy": "fcfs"}) == expected


def test_a_sweep_refuses_wrong_parameters_before_the_first_run(tmp_path):
    with pytest.raises(ConfigError, match="did you mean"):
        sweep(synthetic("plain", 5), over={"polcy": ["slo"]}, folder=tmp_path, progress=False)
    assert not (tmp_path / "runs.jsonl").exists()
    with pytest.raises(ConfigError, match="at least 1 seed"):
        sweep(synthetic("plain", 5), over={"policy": []})


def test_intervals():
    found = interval([1.0, 2.0, 3.0])
    assert found == Interval(2.0, pytest.approx(2.0 - 4.30 / 3**0.5), pytest.approx(2.0 + 4.30 / 3**0.5))
    assert np.isnan(interval([1.0]).half)
    merged = over_seeds([{"a": 1, "b": {"c": 2.0, "d": None}, "e": "x"}, {"a": 3, "b": {"c": 2.0, "d": 4.0}, "e": "x"}])
    assert merged["a"]["mean"] == 2.0
    assert set(merged) == {"a", "b"}
    assert merged["b"]["c"] == {"mean": 2.0, "low": 2.0, "high": 2.0}


def test_a_trace_is_read_by_its_first_lines(tmp_path):
    file = tmp_path / "hour.jsonl"
    rows = [{"arrival_s": n, "prompt_tokens": 10 + n, "output_tokens": 3} for n in range(5)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = trace(file, limit=4, rate_scale=2.0)
    assert read.arrival_s.tolist() == [0.0, 0.5, 1.0, 1.5]
    assert "is read as tokenyard" in str(run(read))


def test_tables_for_pandas_and_arrow(tmp_path):
    pandas, feather = pytest.importorskip("pandas"), pytest.importorskip("pyarrow.feather")
    result = run(synthetic("plain", 10))
    assert isinstance(result.to_pandas(), pandas.DataFrame)
    assert result.to_arrow().num_rows == 10
    result.save(tmp_path / "requests.arrow")
    assert feather.read_table(tmp_path / "requests.arrow").column_names == list(result.columns)


def test_without_the_packages_the_error_says_what_to_install(tmp_path, monkeypatch):
    result = run(synthetic("plain", 3))
    for package in ("pyarrow", "matplotlib"):
        monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ConfigError, match=r"tokenyard\[analysis\]"):
        result.save(tmp_path / "requests.parquet")
    with pytest.raises(ConfigError, match=r"tokenyard\[analysis\]"):
        result.plot()


@pytest.mark.slow
def test_the_page_runs_as_written(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).resolve().parents[2] / "docs/simulator.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page.split("## From Python")[1], re.S | re.M)
    monkeypatch.chdir(tmp_path)
    assert len(blocks) >= 2
    for block in blocks[:2]:
        exec(block, {})
    assert "4 combinations x 3 seeds" in capsys.readouterr().out
    assert len((tmp_path / "sweep/runs.jsonl").read_text().splitlines()) == 12


def test_an_engine_may_be_any_model_on_any_device():
    traffic = synthetic("plain", 20, 1.0)
    one, two = (run(traffic, Engine("h100", "llama-3-8b", Hardware(tp=count))) for count in (1, 2))
    assert two["tpot_s.p50"] < one["tpot_s.p50"]
    assert two.outcome.setup.devices == 2
