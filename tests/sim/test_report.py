import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest

from tests.sim.small_workloads import setup, workload
from tokenyard.base import ConfigError
from tokenyard.sim.engine.presets import preset, preset_names
from tokenyard.sim.report.comparison import OfferedLoad, beyond, write_curves, write_report
from tokenyard.sim.report.slo_misses import missed
from tokenyard.sim.report.svg_charts import Chart, picture
from tokenyard.sim.report.timeline import MAX_SAMPLES, PerfettoTrace, Timeline
from tokenyard.sim.simulate import simulate
from tokenyard.sim.traces.synthetic import synthetic


def marks(chart: Chart, tag: str) -> list[ElementTree.Element]:
    return [element for element in ElementTree.fromstring(chart.svg()).iter() if element.tag == tag]


def test_a_chart_is_valid_and_has_a_mark_per_point():
    chart = Chart("a <title>", "x", "y", x_log=True)
    chart.dots([1, 10, 100], [1, 2, 3], "dots & more")
    chart.line([1, 100], [3, 1], "line")
    chart.line([1, 100], [2, 2], "bound", dashed=True)
    assert len(marks(chart, "circle")) == 3
    assert len(marks(chart, "path")) == 2


def test_a_line_of_one_point_is_seen():
    chart = Chart("t", "x", "y")
    chart.line([1.0], [2.0])
    assert len(marks(chart, "circle")) == 1


def test_values_that_a_log_axis_cannot_show_are_left_out():
    chart = Chart("t", "x", "y", x_log=True, y_log=True)
    chart.dots([0.0, 1.0, 2.0, np.nan], [1.0, 0.0, 5.0, 1.0])
    assert len(marks(chart, "circle")) == 1


def test_a_picture_is_an_svg_file_with_the_charts_side_by_side():
    chart = Chart("t", "x", "y")
    chart.line([1, 2], [1, 2])
    root = ElementTree.fromstring(picture([chart, chart]))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.get("width") == "1240"
    assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) == 2


def test_an_empty_chart_says_so():
    assert "nothing to show" in Chart("t", "x", "y").svg()


def test_a_narrow_log_axis_still_has_numbers():
    chart = Chart("t", "x", "y", x_log=True)
    chart.line([0.0066, 0.0067], [0, 100])
    assert len([text for text in marks(chart, "text") if text.get("text-anchor") == "middle"]) >= 4


def test_a_wide_log_axis_keeps_its_numbers_apart():
    chart = Chart("t", "x", "y", x_log=True)
    chart.line([1e-18, 1.0], [0, 100])
    numbers = [text for text in marks(chart, "text") if text.get("class") == "tick" and text.get("y") == "310"]
    assert 3 <= len(numbers) <= 9


def test_long_labels_have_room_in_the_legend():
    chart = Chart("t", "x", "y")
    for label in ("short", "another", "a label that is as long as half of the whole picture"):
        chart.line([1, 2], [1, 2], label)
    lines = {text.text: int(text.get("y")) for text in marks(chart, "text") if text.get("x") == "81"}
    assert len(set(lines.values())) == 3


def test_rounding_errors_are_no_waits():
    found = dict(zip(*beyond(np.array([1e-18, 2e-9, 0.5, np.nan])), strict=True))
    assert found == {0.0: 75.0, 0.5: 50.0}


def test_a_single_late_request_is_seen(tmp_path):
    traffic = workload(*[(float(second), 100, 1) for second in range(20)])
    write_report(tmp_path / "report.html", {"one": simulate(traffic, setup())})
    assert not any(one["x"] for one in data_of(tmp_path / "report.html")[3]["series"])
    traffic.slo_ttft_s[7] = 1e-4
    write_report(tmp_path / "report.html", {"one": simulate(traffic, setup())})
    assert any(one["x"] for one in data_of(tmp_path / "report.html")[3]["series"])


def test_bars_are_side_by_side_on_zero():
    chart = Chart("t", "", "y")
    chart.bars(["a", "b"], [1.0, 2.0], "one")
    chart.bars(["a", "b"], [2.0, 0.0], "two")
    bars = [element for element in marks(chart, "rect") if element.get("height") != "8"]
    assert len(bars) == 4
    assert float(bars[3].get("height")) == 0.0
    assert len({bar.get("x") for bar in bars}) == 4


def test_points_lie_where_the_axes_say():
    chart = Chart("t", "x", "y", y_from_zero=True)
    chart.dots([0.0, 5.0, 10.0], [0.0, 5.0, 10.0])
    xs = [float(circle.get("cx")) for circle in marks(chart, "circle")]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)


def data_of(path) -> list[dict]:
    text = path.read_text()
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text).group(1))["charts"]


def test_a_report_compares_settings_and_shows_the_gap_between_tenants(tmp_path):
    traffic = synthetic("tenants", 120, 20.0)
    timeline = Timeline()
    outcomes = {
        "one": simulate(traffic, setup(), timeline),
        "two": simulate(traffic, setup("vllm-default")),
    }
    write_report(tmp_path / "report.html", outcomes, {"one": timeline}, command="tokenyard compare one two")
    page = (tmp_path / "report.html").read_text()
    charts = data_of(tmp_path / "report.html")
    assert len(charts) == page.count("data-chart=") == 12
    colours = {one["label"]: one["color"] for one in charts[0]["series"]}
    assert colours["one"] != colours["two"]
    for shown in (
        "Service gap",
        "SLO met",
        "<code>tokenyard compare one two</code>",
        "error of the cost model",
        "<dt>seed</dt>",
    ):
        assert shown in page
    assert charts[-1]["group"] == "over time: step"


def test_misses_are_shown_by_target_and_by_kind(tmp_path):
    traffic = workload(*[(float(second), 100 + second, 5) for second in range(20)])
    place = np.arange(20)
    targets = {"slo_ttft_s": np.where(place < 4, 1e-6, np.nan), "slo_tpot_s": np.where(place // 2 % 4, np.nan, 1e-9)}
    traffic = replace(traffic, **targets)
    found = missed(simulate(traffic, setup()))
    counts = {kind: int(mask.sum()) for kind, mask in found.items()}
    assert counts == {"any": 8, "first": 4, "token": 6, "both": 2, "refused": 0, "unfinished": 0, "unserved": 0}
    write_report(tmp_path / "report.html", {"one": simulate(traffic, setup())})
    page = (tmp_path / "report.html").read_text()
    assert "<td>8 (40.0 %)</td>" in page
    assert "<td>80.0 %: 80.0 / 40.0 / 0.0</td>" in page


def test_goodput_curves_have_a_line_per_setting(tmp_path):
    found = {"a": {"0.9": 1.25, "0.99": 1.0}, "b": {"0.9": 1.0, "0.99": 0.0}}
    load, points = OfferedLoad(5.53, "requests/s"), {"a": [(1.0, 1.0), (2.0, 0.5)], "b": [(1.0, 0.9)]}
    write_curves(tmp_path / "curves.html", points, found, "Goodput", load)
    (chart,) = data_of(tmp_path / "curves.html")
    assert [one["label"] for one in chart["series"]] == ["a", "b", "90 %", "99 %"]
    page = (tmp_path / "curves.html").read_text()
    assert "1 is 5.53 requests/s" in chart["x"]["label"]
    assert "<td class=best>1.25 (6.91)</td><td>1.00 (5.53)</td>" in page


@pytest.mark.slow
def test_a_long_timeline_is_thinned_out_evenly():
    timeline = Timeline()
    simulate(synthetic("plain", 300, 2.0), setup(), timeline)
    assert MAX_SAMPLES / 2 <= len(timeline.samples) < MAX_SAMPLES
    gaps = np.diff([sample.at_s for sample in timeline.samples])
    assert (gaps > 0).all()


def test_perfetto_slices_follow_each_other(tmp_path):
    trace = PerfettoTrace()
    outcome = simulate(synthetic("plain", 20, 5.0), setup(), trace)
    trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"scheduler", "steps on the device"}
    assert len(slices) == outcome.counters["steps"]
    ends = [event["ts"] + event["dur"] for event in slices]
    assert all(begin["ts"] >= end - 1e-6 for begin, end in zip(slices[1:], ends, strict=False))
    assert {event["name"] for event in slices} == {"EXTEND", "DECODE"}


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_valid(name):
    preset(name, 4096).validate()


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(ConfigError, match="sglang-default"):
        preset("sglang", 4096)
