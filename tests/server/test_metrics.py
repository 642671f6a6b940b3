"""What the end of a request adds to the metrics."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.fake import finish
from tokenyard.base import Course, Slo
from tokenyard.engine.spec import GenerateSpec
from tokenyard.server.metrics import Metrics
from tokenyard.server.targets import kept_its_promise, targets_met

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


def test_waiting_and_starvation_are_told_by_class():
    long = finish("length", output=1)
    long.course = Course(queue_ns=31_000 * MS)
    found = counted((long, GenerateSpec(service_class="flex")), (finish("stop"), GenerateSpec()))
    assert found["starvation_total", "low"] == 1
    assert found["queue_wait_seconds_count", "low"] == 1
    assert found["queue_wait_seconds_sum", "normal"] == 0.001
    assert found["queue_wait_seconds_count", "strict"] == 0


def test_made_up_classes_add_no_label():
    found = counted((finish("stop"), GenerateSpec(service_class="somebodysname")))
    assert found["queue_wait_seconds_count", "normal"] == 1
    assert not [key for key in found if "somebodysname" in key]


def test_lost_places_are_told_by_reason():
    end = finish("length")
    end.course = Course(preemptions=2, page_shortages=1)
    found = counted((end, GenerateSpec(service_class="high")))
    assert found["lost_places_total", "high", "preempted"] == 2
    assert found["lost_places_total", "high", "out_of_pages"] == 1
    assert ("lost_places_total", "high", "paused") not in found


def test_refusals_are_told_by_cause_and_do_not_count_as_waiting():
    ends = [(finish("abort", cause=cause), GenerateSpec()) for cause in ("queue_full", "queue_timeout", "cancelled")]
    found = counted(*ends)
    assert found["rejected_requests_total", "queue_full"] == 1
    assert found["rejected_requests_total", "queue_timeout"] == 1
    assert ("rejected_requests_total", "cancelled") not in found
    assert found["queue_wait_seconds_count", "normal"] == 2


def test_goodput_counts_requests_that_met_all_their_targets():
    good, late = GenerateSpec(slo=Slo(ttft_ns=10_000 * MS)), GenerateSpec(deadline_ms=1.0, service_class="high")
    found = counted(
        (finish("length", output=5), good),
        (finish("length", output=7), late),
        (finish("abort", cause="overdue", status=503), good),
        (finish("abort", cause="cancelled", status=499), good),
        (finish("length", output=9), GenerateSpec()),
    )
    assert found["slo_requests_total", "normal", "yes"] == 1
    assert found["slo_requests_total", "normal", "no"] == 1
    assert found["goodput_tokens_total", "normal"] == 5
    assert found["slo_requests_total", "high", "no"] == 1
    assert found["deadline_misses_total", "high"] == 1


@pytest.mark.parametrize(
    ("spec", "kept"),
    [
        (GenerateSpec(), None),
        (GenerateSpec(slo=Slo()), None),
        (GenerateSpec(slo=Slo(ttft_ns=3 * MS, tpot_ns=1 * MS)), True),
        (GenerateSpec(slo=Slo(ttft_ns=1 * MS)), False),
        (GenerateSpec(slo=Slo(tpot_ns=1)), False),
        (GenerateSpec(deadline_ms=4.0), True),
    ],
)
def test_a_promise_is_kept_if_every_target_is(spec, kept):
    assert kept_its_promise(finish("length", output=3), spec) is kept


def test_one_token_has_no_time_per_token():
    assert targets_met(finish("length", output=1), GenerateSpec(slo=Slo(tpot_ns=1))) == []
