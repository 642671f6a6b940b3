"""Reports as pages: self-contained, safe, the same colours everywhere."""

import base64
import hashlib
import json
import re

import numpy as np

from tokenyard.sim.report.html_page import Report, Row, Section, Table, colours_of, page
from tokenyard.sim.report.svg_charts import Chart

EVIL = "</script><img src=x onerror=alert(1)>"


def report(**more):
    chart = Chart("title " + EVIL, "x", "y")
    chart.line([1, 2, 3], [1.23456789, 2, np.inf], EVIL)
    table = Table("t", ["fcfs", "slo"], [Row("met", ["90 %", "95 %"], [0.9, 0.95], "more")])
    return Report("a " + EVIL, {"command": EVIL}, [Section("s", [chart], [table], [EVIL])], ["fcfs", "slo"], **more)


def test_text_stays_text_and_scripts_are_those_of_the_policy():
    text = page(report(warnings=["off by 30 % " + EVIL]))
    assert "<img" not in text
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)
    policy = re.search(r'content="(default-src[^"]*)"', text).group(1)
    assert len(scripts) == 3
    for script in scripts:
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert not re.findall(r"<[^>]*(?:src|href)=", text.split("<body>")[1].split("<script")[0])
    (chart,) = json.loads(scripts[0])["charts"]
    assert chart["series"][0]["y"] == [1.235, 2]
    assert chart["series"][0]["label"] == EVIL


def test_the_best_of_a_row_is_marked_where_there_is_one():
    assert Row("a", ["0.5", "-", "0.7"], [0.5, None, 0.7], "more").best() == {2}
    assert Row("a", ["3", "1", "1"], [3, 1, 1], "less").best() == {1, 2}
    assert Row("a", ["", ""], [1, 1], "less").best() == set()
    assert Row("a", ["2", "2", "3"], [2.04, 2.01, 3], "less").best() == {0, 1}, "a reader cannot tell these apart"
    assert Row("a", ["2", "2"], [2.04, 2.01], "less").best() == set()
    assert Row("a", ["", ""], [1, None], "less").best() == set()
    assert Row("a", ["", ""], [1, 2]).best() == set()
    assert "<td>90 %</td><td class=best>95 %</td>" in page(report())


def test_a_setting_has_one_colour_on_all_pages():
    alone, among = colours_of(["slo"]), colours_of(["my_pkg:Own", "lpm", "slo", "fcfs"])
    assert alone["slo"] == among["slo"]
    assert len(set(among.values())) == 4
    many = colours_of([f"name{place}" for place in range(16)])
    assert len(set(many.values())) == 16


def test_a_hundred_thousand_points_of_fifteen_settings_stay_small():
    charts = []
    rng = np.random.default_rng(0)
    for _ in range(10):
        chart = Chart("c", "x", "y")
        for setting in range(15):
            chart.line(np.sort(rng.random(500)), rng.random(500), f"s{setting}")
        charts.append(chart)
    assert len(page(Report("t", {}, [Section("s", charts)]))) < 2_000_000
