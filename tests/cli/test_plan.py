"""`tokenyard plan` on the command line: what it takes, what it prints and what it refuses."""

import json

import pytest

from tokenyard.cli.main import main

SMALL = ["--synthetic", "plain", "--limit", "40", "--request-rate", "60", "--jobs", "1"]
PRICES = "devices: [{device: h100, price: 2.5}, {device: a100, price: 2.0, error: 0.1, max_count: 8}]"


def test_a_plan_names_the_fleet_what_ifs_and_what_the_cost_model_can_change(tmp_path, capsys):
    (tmp_path / "d.yaml").write_text(PRICES)
    out, page = tmp_path / "o.json", tmp_path / "o.html"
    outputs = ["--policies", "fcfs", "--json", str(out), "--report", str(page)]
    assert main(["plan", *SMALL, "--devices", str(tmp_path / "d.yaml"), "--seeds", "2", *outputs]) == 0
    plan = json.loads(out.read_text())
    best = plan["fleets"][plan["cheapest"]]
    assert best["device"] == "h100/llama-3-8b"
    assert best["attainment"] >= 0.99
    assert best["price_per_hour"] == 2.5 * best["devices"]
    assert best["attainment_interval"][0] <= best["attainment"] <= best["attainment_interval"][1]
    assert plan["what_if"][0]["attainment_with_one_down"] <= best["attainment"]
    assert plan["cost_model"]["sensitivity"]
    shown = capsys.readouterr().out
    for words in ("cheapest", "an hour", "one replica down", "its error is unknown", "10 % of a step", "repeated"):
        assert words in shown, words
    assert "Devices needed" in page.read_text()


def test_without_prices_devices_are_counted(capsys):
    assert main(["plan", *SMALL, "--policies", "fcfs", "--seeds", "1"]) == 0
    shown = capsys.readouterr().out
    assert "no prices were given" in shown
    assert "an hour" not in shown


def test_too_few_devices_are_no_plan_and_the_note_says_how_close_they_came(tmp_path, capsys):
    argv = ["--max-replicas", "1", "--policies", "fcfs", "--slo-ttft-ms", "20", "--slo-ttft-scale", "0", "--seeds", "1"]
    assert main(["plan", *SMALL, *argv, "--json", str(tmp_path / "o.json")]) == 1
    shown = capsys.readouterr().out
    for words in ("no fleet of up to 1 replicas", "fcfs: at most ", "its error is unknown"):
        assert words in shown, words
    plan = json.loads((tmp_path / "o.json").read_text())
    assert plan["fleets"] == []
    assert plan["left_out"][0]["attainment"] < 0.99


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "cannot be read as YAML"),
        ("a: 1", "give a list 'devices'"),
        ("devices: []", "give a list 'devices'"),
        ("devices: [{price: 1}]", "either device or profile"),
        ("devices: [{device: h100, prize: 1}]", "either device or profile"),
        ("devices: [{device: abacus}]", "no data sheet of device"),
        ("devices: [{device: h100, price: 0}]", "above 0"),
        ("devices: [{device: h100, price: free}]", "price is 'free'"),
        ("devices: [{device: h100, error: 2}]", "below 1"),
        ("devices: [{device: h100, max_count: 0}]", "max_count is 0"),
        ("devices: [{device: h100, price: 1}, {device: a100}]", "give all or none"),
    ],
)
def test_a_wrong_file_of_devices_is_one_line(tmp_path, capsys, text, complaint):
    (tmp_path / "d.yaml").write_text(text)
    assert main(["plan", *SMALL, "--devices", str(tmp_path / "d.yaml")]) == 2
    shown = capsys.readouterr().err
    assert complaint in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--devices", "nowhere.yaml"], "no such file"),
        (["--devices", ","], "names nothing"),
        (["--devices", "abacus"], "no data sheet of device"),
        (["--target", "1.5"], "--target"),
        (["--seeds", "0"], "--seeds"),
        (["--max-replicas", "0"], "--max-replicas"),
        (["--dp-sizes", "0"], "--dp-sizes"),
        (["--dp-sizes", "two"], "--dp-sizes"),
        (["--routers", "nearest"], "no router policy"),
        (["--policies", "fcfs,fcfs"], "each once"),
        (["--policies", "fcsf"], "no schedule policy"),
        (["--preset", "sarathi"], "--policies"),
        (["--json", "nowhere/o.json"], "--json"),
        (["--trace", "x"], "either --trace"),
        (["--autoscale", "qeue"], "did you mean queue"),
        (["--autoscale", "queue", "--cold-start-s", "nan"], "must be finite"),
        (["--autoscale", "queue", "--prefill-shares", "0,0.5"], "leave out --prefill-shares"),
    ],
)
def test_wrong_arguments_are_one_line(capsys, argv, complaint):
    assert main(["plan", *SMALL, *argv]) == 2
    shown = capsys.readouterr().err
    assert complaint in shown
    assert shown.count("\n") == 1


def test_a_fleet_of_one_is_compared_with_its_autoscaler(tmp_path, capsys):
    out = tmp_path / "o.json"
    argv = ["--max-replicas", "1", "--policies", "fcfs", "--target", "0.1", "--seeds", "1", "--autoscale", "queue"]
    assert main(["plan", *SMALL, *argv, "--json", str(out)]) == 0
    (scaled,) = json.loads(out.read_text())["autoscaled"]
    assert (scaled["mean_replicas"], scaled["max_replicas"], scaled["price_per_hour"]) == (1.0, 1, None)
    shown = capsys.readouterr().out
    assert "Fixed or autoscaled" in shown
    assert "an hour" not in shown


@pytest.mark.slow
def test_prefill_engines_and_kv_stores_are_variants(tmp_path, capsys):
    out = tmp_path / "o.json"
    kinds = ["--prefill-shares", "0.5", "--link-gbit", "400", "--kv-stores", "0+0,40+0", "--policies", "fcfs"]
    argv = ["plan", *SMALL, *kinds, "--seeds", "1", "--slo-tpot-ms", "9", "--json", str(out)]
    assert main(argv) == 0
    plan = json.loads(out.read_text())
    policies = {fleet["policy"] for fleet in plan["fleets"]} | {one["kind"] for one in plan["left_out"]}
    for words in ("50 % prefill at 400 Gbit/s", "40+0 GB KV store"):
        assert any(words in policy for policy in policies), words
    capsys.readouterr()


@pytest.mark.parametrize("words", ["--prefill-shares 1", "--prefill-shares x", "--kv-stores 5", "--kv-stores 1+1,1+1"])
def test_wrong_kinds_are_one_line(words, capsys):
    assert main(["plan", *SMALL, *words.split()]) == 2
    assert words.split()[0] in capsys.readouterr().err


def test_deprecated_names_are_accepted_with_a_warning(tmp_path, caplog):
    (tmp_path / "d.yaml").write_text("devices: [{device: h100, most: 1}]")
    argv = [
        "--devices",
        str(tmp_path / "d.yaml"),
        "--most",
        "4",
        "--tiers",
        "0+0",
        "--policies",
        "fcfs",
        "--seeds",
        "1",
    ]
    assert main(["plan", *SMALL, *argv, "--seeds", "1", "--slo-ttft-ms", "20", "--slo-ttft-scale", "0", "--quiet"]) == 1
    for old, new in (("--most", "--max-replicas"), ("--tiers", "--kv-stores"), (": most", "max_count")):
        assert any(old + " is deprecated" in one and one.endswith(new) for one in caplog.messages), old
