"""Workloads that are drawn from the configurations of Vidur and the specifications of BLIS, against their formulas."""

import json
from math import cos, pi

import numpy as np
import pytest

from tokenyard.base import ConfigError
from tokenyard.sim.traces.formats import detect_format, read_trace
from tokenyard.sim.traces.read_options import ReadOptions
from tokenyard.sim.traces.vidur_config import zipf

HOUR_S = 3600.0


def vidur(tmp_path, lengths, gaps=None, **fields):
    config = {
        "seed": 42,
        "cluster_config": {"num_replicas": 1},
        "request_generator_config": {
            "seed": 42,
            "length_generator_config": {"seed": 42, **lengths},
            "interval_generator_config": {"seed": 42, **(gaps or {"name": "poisson", "qps": 8.0})},
            "num_requests": 8_000,
            "duration": None,
            "max_tokens": 4096,
            "name": "synthetic",
            **fields,
        },
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config, indent=4))
    return path


ZIPF = {"name": "zipf", "theta": 0.6, "scramble": False, "min_tokens": 1024, "max_tokens": 4096}


def test_zipf_gives_the_numbers_of_vidurs_generator():
    # ZipfGenerator(1024, 4096, 0.6, False, 42) and (8, 512, 0.99, False, 7) at commit 7d47513, first ten numbers.
    uniform = np.random.RandomState(42).random_sample(10)
    assert zipf(1024, 4096, 0.6, uniform).tolist() == [1330, 3745, 2481, 1930, 1070, 1070, 1032, 3200, 1938, 2370]
    uniform = np.random.RandomState(7).random_sample(10)
    assert zipf(8, 512, 0.99, uniform).tolist() == [8, 133, 21, 95, 447, 34, 28, 8, 12, 28]


def test_lengths_of_vidurs_zipf_follow_its_formula(tmp_path):
    path = vidur(tmp_path, {**ZIPF, "prefill_to_decode_ratio": 3.0})
    assert detect_format(path) == "vidur-config"
    workload = read_trace(path, "vidur-config", ReadOptions(seed=1))
    total = workload.prompt_tokens + workload.output_tokens
    # A quarter is the answer, both rounded down.
    assert set((total / workload.output_tokens).round(1)) <= {3.9, 4.0}
    items, theta = 4096 - 1024 + 1, 0.6
    zeta = np.sum(np.arange(1, items) ** -theta)
    eta = (1 - (2 / items) ** (1 - theta)) / (1 - 1 / zeta)
    for length in (1100, 1500, 2000, 3000, 4000):
        share = ((((length - 1024) / items) ** (1 - theta)) + eta - 1) / eta
        assert (total < length).mean() == pytest.approx(share, abs=0.012)
    scrambled = read_trace(vidur(tmp_path, {**ZIPF, "scramble": True}), "vidur-config", ReadOptions(seed=1))
    mean = (scrambled.prompt_tokens + scrambled.output_tokens).mean()
    assert mean == pytest.approx((1024 + 4096) / 2, rel=0.05), "the frequent lengths are anywhere"


def test_flags_of_vidur_are_the_same_as_its_file(tmp_path):
    flags = tmp_path / "flags.yaml"
    flags.write_text(
        "length_generator_config_type: zipf\nzipf_request_length_generator_config_theta: 0.6\n"
        "synthetic_request_generator_config_num_requests: 8000\npoisson_request_interval_generator_config_qps: 8.0\n"
        "replica_config_device: a100\n"
    )
    assert detect_format(flags) == "vidur-config"
    one, other = (read_trace(path, "vidur-config") for path in (flags, vidur(tmp_path, ZIPF)))
    assert (one.prompt_tokens == other.prompt_tokens).all()
    assert (one.arrival_s == other.arrival_s).all()


def test_gaps_and_lengths_of_vidur(tmp_path):
    uniform = {"name": "uniform", "min_tokens": 100, "max_tokens": 300, "prefill_to_decode_ratio": 4.0}
    workload = read_trace(vidur(tmp_path, uniform), "vidur-config")
    gaps = np.diff(workload.arrival_s)
    assert gaps.max() == pytest.approx(3 / 8.0), "Vidur cuts the gaps of a Poisson process at three means"
    assert gaps.mean() == pytest.approx((1 - np.exp(-3.0)) / 8.0, rel=0.03)
    total = workload.prompt_tokens + workload.output_tokens
    assert total.mean() == pytest.approx(200, rel=0.01)
    assert (workload.output_tokens >= total / 5).all(), "answers are rounded up"
    fixed = {"name": "fixed", "prefill_tokens": 7, "decode_tokens": 3}
    bursty = read_trace(vidur(tmp_path, fixed, {"name": "gamma", "qps": 4.0, "cv": 2.0}), "vidur-config")
    gaps = np.diff(bursty.arrival_s)
    assert (gaps.mean(), gaps.std() / gaps.mean()) == pytest.approx((0.25, 2.0), rel=0.06)
    assert set(bursty.prompt_tokens) == {7}
    short = read_trace(vidur(tmp_path, fixed, duration=10.0), "vidur-config")
    assert len(short) == pytest.approx(84, abs=30)
    at_once = read_trace(vidur(tmp_path, fixed, {"name": "static"}, num_requests=5), "vidur-config")
    assert at_once.arrival_s.tolist() == [0.0] * 5


def test_traces_that_a_configuration_of_vidur_names(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "t.csv").write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,100,10\n2.0,900,300\n5.0,50,0\n"
    )
    (tmp_path / "run").mkdir()
    of_lengths = {"name": "trace", "trace_file": "./data/t.csv", "prefill_scale_factor": 1, "decode_scale_factor": 2}
    drawn = read_trace(vidur(tmp_path / "run", {**of_lengths, "max_tokens": 1000}), "vidur-config")
    # 900 and 600 tokens are 500 too many, of which the prompt gives three fifths; an answer has at least one token.
    assert sorted(zip(drawn.prompt_tokens, drawn.output_tokens, strict=True)) == [(50, 1), (100, 20), (600, 400)]
    flags = tmp_path / "run" / "flags.json"
    flags.write_text(
        '{"request_generator_config_type": "trace_replay", "trace_request_generator_config_trace_file": "data/t.csv",'
        ' "trace_request_generator_config_time_scale_factor": 0.5, "trace_request_generator_config_max_tokens": 1000}'
    )
    assert detect_format(flags) == "vidur-config"
    replayed = read_trace(flags, "vidur-config")
    assert replayed.arrival_s.tolist() == [0.0, 1.0, 2.5]
    assert replayed.prompt_tokens.tolist() == [100, 700, 50], "only the prompt is cut"
    (tmp_path / "data" / "a.csv").write_text(
        "arrival_time\n1970-01-04 11:00:00\n1970-01-04 12:00:01\n1970-01-04 12:00:03.9\n1970-01-04 12:00:11\n"
    )
    fixed = {"name": "fixed", "prefill_tokens": 7, "decode_tokens": 3}
    timed = vidur(tmp_path / "run", fixed, {"name": "trace", "trace_file": "data/a.csv", "time_scale_factor": 2.0})
    assert read_trace(timed, "vidur-config").arrival_s.tolist() == [0.0, 16.0]


@pytest.mark.parametrize(
    ("lengths", "complaint"),
    [
        ({"name": "zipf", "theta": 1.0}, "theta is 1.0"),
        ({"name": "zipf", "min_tokens": 5000}, "min_tokens must be from 1 to max_tokens"),
        ({"name": "zip"}, "one of fixed, uniform, zipf, trace"),
        ({"name": "zipf", "thta": 0.5}, "theta may be meant"),
        ({"name": "trace", "trace_file": "no/such.csv"}, "needs no/such.csv"),
    ],
)
def test_a_bad_configuration_of_vidur_is_one_clear_line(tmp_path, lengths, complaint):
    with pytest.raises(ConfigError, match=complaint) as error:
        read_trace(vidur(tmp_path, lengths), "vidur-config")
    assert "\n" not in error.value.message


def blis(tmp_path, text, **options):
    path = tmp_path / "spec.yaml"
    prompt, answer = (f"distribution: {{type: constant, params: {{value: {tokens}}}}}" for tokens in (90, 7))
    path.write_text(text.replace("LENGTHS", f"input_{prompt}, output_{answer}"))
    assert detect_format(path) == "blis-spec"
    return read_trace(path, "blis-spec", ReadOptions(**options))


def test_a_cohort_of_blis_follows_the_hour(tmp_path):
    workload = blis(
        tmp_path,
        "{aggregate_rate: 0.25, cohorts: [{population: 5, rate_fraction: 1, arrival: {process: poisson}, LENGTHS,"
        " diurnal: {peak_hour: 14, peak_to_trough_ratio: 4.0}}]}",
    )
    # BLIS is active in the first part of each hour, for a share of it that falls from 1 at the peak to a quarter.
    shares = np.array([(1 + cos(2 * pi * (hour - 14) / 24)) / 2 * 0.75 + 0.25 for hour in range(24)])
    first_s = workload.arrival_s + 5.0  # about when the first request came
    counts = np.bincount((first_s // HOUR_S).astype(int), minlength=24)
    assert counts == pytest.approx(900 * shares, rel=0.25)
    assert (first_s % HOUR_S)[first_s // HOUR_S == 2].max() < 0.25 * HOUR_S + 10
    assert len(workload) == pytest.approx(900 * shares.sum(), rel=0.03)


def test_a_cohort_of_blis_ends_and_another_rises(tmp_path):
    workload = blis(
        tmp_path,
        "{aggregate_rate: 100, cohorts: ["
        "{population: 2, tenant_id: a, rate_fraction: 1, arrival: {process: poisson}, LENGTHS,"
        " drain: {start_time_us: 10000000, ramp_duration_us: 20000000}},"
        "{population: 3, tenant_id: b, rate_fraction: 1, arrival: {process: poisson}, LENGTHS,"
        " spike: {start_time_us: 5000000, duration_us: 5000000}}]}",
    )
    is_a = np.array(workload.tenants)[workload.tenant] == "a"
    assert is_a.sum() == pytest.approx(50 * (10 + 20 * 0.55), rel=0.1)
    assert (~is_a).sum() == pytest.approx(250, rel=0.2)
    late = workload.arrival_s[is_a & (workload.arrival_s > 20)]
    assert ((late - 9.5) % 2 < 1.6).all(), "from the middle on each segment of 2 s is active for half of it or less"
    weighed = blis(
        tmp_path,
        "{aggregate_rate: 100, cohorts: [{population: 1, tenant_id: a, rate_fraction: 1, arrival: {process: gamma,"
        " cv: 2}, LENGTHS, spike: {start_time_us: 0, duration_us: 9000000, trace_rate: 3}}], clients: [{tenant_id: b,"
        " rate_fraction: 1, arrival: {process: constant}, LENGTHS, lifecycle: {windows: [{start_us: 0, end_us:"
        " 9000000}]}}]}",
    )
    # Where windows have weights, BLIS stretches gaps to fill them: 675 and 225 requests, of which the last is beyond.
    assert sorted(np.bincount(weighed.tenant)[1:].tolist()) == [224, 674]


def test_chats_of_inference_perf_are_one_conversation_per_user(tmp_path):
    stages = (
        "{inference_perf: {stages: [{rate: 5, duration: 20}], shared_prefix: {num_unique_system_prompts: 2,"
        " num_users_per_system_prompt: 4, system_prompt_len: 64, question_len: 30, output_len: 9,"
        " enable_multi_turn_chat: CHAT}}}"
    )
    chat = blis(tmp_path, stages.replace("CHAT", "true"))
    assert sorted(np.bincount(chat.sessions.session).tolist()) == [12] * 4 + [13] * 4
    assert set(chat.sessions.gap_s.tolist()) == {0.0, 1.6}, "eight users share 5 requests/s"
    assert set(chat.prompt_tokens) == {94}, "prompts do not grow"
    single = blis(tmp_path, stages.replace("CHAT", "false"))
    assert len(single) == 100, "a single stage has exactly its number of requests"
    assert single.span_s <= 20.0


def test_images_of_blis_count_as_their_tokens(tmp_path):
    workload = blis(
        tmp_path,
        "{aggregate_rate: 10, num_requests: 2000, clients: [{rate_fraction: 1, arrival: {process: poisson}, LENGTHS,"
        " multimodal: {text_distribution: {type: constant, params: {value: 20}}, image_distribution: {type: constant,"
        " params: {value: 500}}, image_count_distribution: {type: empirical, params: {1: 0.5, 3: 0.5}}}}]}",
    )
    assert set(workload.prompt_tokens) == {520, 1520}
    assert (workload.prompt_tokens == 520).mean() == pytest.approx(0.5, abs=0.05)


def test_open_loops_of_blis_do_not_wait(tmp_path):
    talk = (
        "{aggregate_rate: 1, num_requests: 12, clients: [{rate_fraction: 1, arrival: {process: poisson}, LENGTHS,"
        " closed_loop: false, reasoning: {multi_turn: {max_rounds: 3, think_time_us: 500000, context_growth:"
        " accumulate, single_session: false}}}]}"
    )
    sessions = blis(tmp_path, talk).sessions
    assert sessions.gap_s[:3] == pytest.approx([0.0, 0.500007, 1.000014])
    one = blis(tmp_path, talk.replace("single_session: false", "single_session: true")).sessions
    assert np.bincount(one.session).tolist() == [3]


def test_users_of_blis_share_what_clients_with_a_rate_leave(tmp_path):
    workload = blis(
        tmp_path,
        "{aggregate_rate: 10, num_requests: 100, horizon: 2000000, clients: [{rate_fraction: 1, arrival: {process:"
        " constant}, LENGTHS}, {concurrency: 4, think_time_us: 80000, LENGTHS}]}",
    )
    lengths = np.bincount(workload.sessions.session)
    assert (lengths == 1).sum() == 19
    assert sorted(lengths[lengths > 1].tolist()) == [18, 21, 21, 21]


@pytest.mark.parametrize("cv", [0.3, 2.0, 5.0])
def test_weibull_gaps_have_their_coefficient_of_variation(tmp_path, cv):
    workload = blis(
        tmp_path,
        "{aggregate_rate: 10, num_requests: 20000, clients: [{rate_fraction: 1, arrival: {process: weibull, cv: CV},"
        " LENGTHS}]}".replace("CV", str(cv)),
    )
    gaps = np.diff(workload.arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.12)
    assert gaps.mean() == pytest.approx(0.1, rel=0.1)


def test_fitted_scales_of_blis_give_the_rate(tmp_path):
    workload = blis(
        tmp_path,
        "{aggregate_rate: 1000, num_requests: 2000, clients: [{rate_fraction: 1, arrival: {process: gamma, shape: 2.0,"
        " scale: 50000}, LENGTHS}]}",
    )
    assert np.diff(workload.arrival_s).mean() == pytest.approx(0.1, rel=0.06)
