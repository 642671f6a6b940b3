"""What the end of a request adds to the metrics."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.fake import finish
from tokenyard.base import RequestTimings, SloTargets
from tokenyard.engine.frontend.io_struct import GenerateReqInput
from tokenyard.engine.scheduler_process.health.slo_attainment import met_slo, targets_met
from tokenyard.server.metrics.endpoint_picker import gauges_text
from tokenyard.server.metrics.loads import load_of
from tokenyard.server.metrics.prometheus import Metrics
from tokenyard.server.metrics.table import COMPAT
from tokenyard.server.native.control_routes import totals_of

MS = 1_000_000


def counted(*ends):
    """The metrics after these (finish, spec) pairs, by name and labels."""
    metrics = Metrics("m")
    for end, spec in ends:
        metrics.finished(end, spec)
    families = text_string_to_metric_families(metrics.exposition().decode())
    samples = [sample for family in families for sample in family.samples]
    return {
        (
            sample.name.removeprefix("tokenyard_"),
            *(v for k, v in sorted(sample.labels.items()) if k != "model"),
        ): sample.value
        for sample in samples
    }


def test_waiting_and_starvation_are_reported_by_class():
    long = finish("length", output=1)
    long.timings = RequestTimings(queue_ns=31_000 * MS)
    found = counted((long, GenerateReqInput(service_class="flex")), (finish("stop"), GenerateReqInput()))
    assert found["starvation_total", "low"] == 1
    assert found["queue_wait_seconds_count", "low"] == 1
    assert found["queue_wait_seconds_sum", "normal"] == 0.001
    assert found["queue_wait_seconds_count", "strict"] == 0


def test_made_up_classes_add_no_label():
    found = counted((finish("stop"), GenerateReqInput(service_class="somebodysname")))
    assert found["queue_wait_seconds_count", "normal"] == 1
    assert not [key for key in found if "somebodysname" in key]


def test_retractions_and_preemptions_are_counted_by_reason():
    end = finish("length")
    end.timings = RequestTimings(preemptions=2, page_shortages=1)
    found = counted((end, GenerateReqInput(service_class="high")))
    assert found["lost_places_total", "high", "preempted"] == 2
    assert found["lost_places_total", "high", "out_of_pages"] == 1
    assert ("lost_places_total", "high", "paused") not in found


def test_refusals_are_reported_by_cause_and_do_not_count_as_waiting():
    ends = [
        (finish("abort", cause=cause), GenerateReqInput()) for cause in ("queue_full", "queue_timeout", "cancelled")
    ]
    found = counted(*ends)
    assert found["rejected_requests_total", "queue_full"] == 1
    assert found["rejected_requests_total", "queue_timeout"] == 1
    assert ("rejected_requests_total", "cancelled") not in found
    assert found["queue_wait_seconds_count", "normal"] == 2


def promised(reason, output=0, ttft_ms=0.0, tpot_ms=1000.0, deadline_ms=0.0, **more):
    """The end of a request that got its first token after 2 ms and ended after 3, with what it was promised."""
    end = finish(reason, output=output, **more)
    end.slo_targets = SloTargets(*(round(value * MS) for value in (ttft_ms, tpot_ms, deadline_ms)))
    return end


def test_goodput_counts_requests_that_met_all_their_targets():
    plain, high = GenerateReqInput(), GenerateReqInput(service_class="high")
    found = counted(
        (promised("length", 5, ttft_ms=10_000), plain),
        (promised("length", 7, deadline_ms=0.5), high),
        (promised("abort", cause="overdue"), plain),
        (promised("abort", cause="cancelled"), plain),
        (promised("abort", cause="invalid"), plain),
        (finish("length", output=9), plain),
    )
    assert found["slo_requests_total", "normal", "yes"] == 1
    assert found["slo_requests_total", "normal", "no"] == 1
    assert found["goodput_tokens_total", "normal"] == 5
    assert found["slo_requests_total", "high", "no"] == 1
    assert found["deadline_misses_total", "high", "queue"] == 1
    assert found["targets_total", "high", "no", "deadline"] == 1
    assert found["targets_total", "normal", "yes", "ttft"] == 1
    assert ("goodput_tokens_total", "high") not in found


@pytest.mark.parametrize(
    ("end", "kept"),
    [
        (finish("length", output=3), None),
        (promised("length", 3), True),
        (promised("length", 3, ttft_ms=3, tpot_ms=1), True),
        (promised("length", 3, ttft_ms=1, tpot_ms=1), False),
        (promised("length", 3, tpot_ms=0.001), False),
        (promised("length", 3, deadline_ms=4), True),
        (promised("length", 3, deadline_ms=2), False),
        (promised("abort", cause="queue_full"), False),
        (promised("abort", cause="tenant_limit"), None),
    ],
)
def test_a_promise_is_kept_if_every_target_is(end, kept):
    assert met_slo(end) is kept


def test_one_token_has_no_time_per_token():
    assert targets_met(promised("length", 1, tpot_ms=0.001)) == []


@pytest.mark.parametrize(("deadline_ms", "stage"), [(0.5, "queue"), (1.5, "prefill"), (2.5, "decode")])
def test_a_missed_deadline_is_reported_by_the_stage_of_the_request(deadline_ms, stage):
    found = counted((promised("length", 3, deadline_ms=deadline_ms), GenerateReqInput()))
    assert found["deadline_misses_total", "normal", stage] == 1


def test_inversion_is_reported_by_class():
    end = finish("length", output=1)
    end.timings = RequestTimings(inverted_ns=1_500 * MS)
    found = counted((end, GenerateReqInput(service_class="high")), (finish("stop"), GenerateReqInput()))
    assert found["priority_inversion_seconds_total", "high"] == 1.5
    assert ("priority_inversion_seconds_total", "normal") not in found


def test_measures_of_policies_and_limits_and_the_error_of_the_cost_model():
    measures = {"deferred": 8, "deferred_requests": 3, "service_gap_tokens": 5.0, "borrowed_tokens": 7.0}
    state = {"measures": measures, "step_time_error": 0.25}
    metrics = Metrics("m")
    metrics.set_load(load_of(state), totals_of(state))
    text = metrics.exposition().decode()
    lines = {"deferred_requests": 3.0, "deferred_total": 8.0, "service_gap_tokens": 5.0, "borrowed_tokens": 7.0}
    lines |= {"relegated_requests": 3.0, "relegated_total": 8.0}
    for line, value in (lines | {"step_time_error_ratio": 0.25}).items():
        assert f'tokenyard_{line}{{model="m"}} {value}\n' in text
    metrics.set_load(load_of({"step_time_error": None}), {})
    assert "service_gap_tokens" not in metrics.exposition().decode(), "the other policy does not report it"
    assert "step_time_error" not in metrics.exposition().decode()


def test_what_looking_ahead_found_is_reported_by_candidate():
    metrics = Metrics("m")
    assert b"lookahead" not in metrics.exposition()
    metrics.adaptive = {
        "looks": 7,
        "cpu_s": 1.5,
        "failures": 1,
        "scores": [{"name": "slo", "met": 0.75, "ttft_s": 0.5}, {"name": "lpm", "met": 0.5, "ttft_s": 2.0}],
        "switches": [{"candidate": "slo", "times": 2}],
    }
    text = metrics.exposition().decode()
    assert 'tokenyard_lookahead_runs_total{model="m"} 7.0' in text
    assert 'tokenyard_lookahead_looks_total{model="m"} 7.0' in text, "the old name"
    assert 'tokenyard_lookahead_cpu_seconds_total{model="m"} 1.5' in text
    assert 'tokenyard_lookahead_failures_total{model="m"} 1.0' in text
    assert 'tokenyard_lookahead_met{candidate="lpm",model="m"} 0.5' in text
    assert 'tokenyard_lookahead_ttft_seconds{candidate="slo",model="m"} 0.5' in text
    assert 'tokenyard_policy_switches_total{candidate="slo",model="m"} 2.0' in text


def test_gauges_for_gateways_have_the_configured_names():
    load = load_of({"running": 3, "waiting": 2, "used_tokens": 25, "total_tokens": 100})
    text = gauges_text(load, [{"running_requests": "tokenyard_running_requests"}, COMPAT["vllm"]], 'model_name="m"')
    found = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
    assert found == {
        "tokenyard_running_requests": 3.0,
        "vllm:num_requests_running": 3.0,
        "vllm:num_requests_waiting": 2.0,
        "vllm:kv_cache_usage_perc": 0.25,
    }
