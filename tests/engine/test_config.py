"""The engine's settings: what the loaded model decides, and their way to a child process and back."""

from dataclasses import replace

import pytest

from tests.engine.engines import mock_config
from tokenyard.base import ConfigError, SchedulerSettings
from tokenyard.engine.processes.engine_config import ChildReport, ChildTask, decode_report, decode_task, encode_line
from tokenyard.engine.scheduler_process.build_scheduler import load_prior
from tokenyard.engine.scheduler_process.scheduler_loop import load_executor


def test_the_model_decides_page_size_context_and_steps_in_flight():
    config = mock_config(page_size=4, context_length=512)
    config.scheduler = SchedulerSettings(page_size=1, context_length=10**6, max_running_requests=7)
    info = load_executor(config).info
    settings = config.scheduler_settings(info)
    assert (settings.page_size, settings.context_length, settings.max_in_flight) == (4, 512, 2)
    assert settings.max_running_requests == 7
    config.overlap = False
    assert config.scheduler_settings(info).max_in_flight == 1


def test_a_cpu_has_nothing_to_overlap_with():
    config = mock_config()
    info = replace(load_executor(config).info, device="cpu")
    assert config.plans_in_flight(info) == 1
    assert config.scheduler_settings(info).max_in_flight == 1


def test_stages_have_a_plan_each_in_flight_on_a_cpu_too():
    info = replace(load_executor(mock_config()).info, device="cpu")
    assert replace(mock_config(), pp_size=2).plans_in_flight(info) == 2
    assert replace(mock_config(), pp_size=2, pp_async_batch_depth=1).plans_in_flight(info) == 3
    assert replace(mock_config(), pp_size=2, overlap=False).plans_in_flight(info) == 1


def test_tasks_and_reports_travel_as_lines():
    config = mock_config(answer_tokens=[2, 3])
    task = ChildTask(config, 1, "d", 1, 7, "a note")
    line = encode_line(task)
    assert line.count(b"\n") == 1
    assert decode_task(line) == task
    report = ChildReport(info=load_executor(config).info)
    assert decode_report(encode_line(report)) == report
    assert "without a report" in decode_report(b"").failure
    with pytest.raises(ConfigError, match="do not decode"):
        decode_task(b"{}")


def test_executors_and_costs_are_found_by_name():
    with pytest.raises(ConfigError, match="there are: torch, mock"):
        load_executor(replace(mock_config(), executor="abacus"))
    assert load_prior("") is None
    assert load_prior("h100/llama-3-8b") is not None
    with pytest.raises(ConfigError):
        load_prior("abacus/llama")


def test_the_mock_reads_the_models_config(tmp_path):
    info = load_executor(mock_config()).info
    assert (info.vocab_size, info.context_length, info.eos_token_ids) == (2048, 1024, (1, 6))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="vocab_size"):
        load_executor(replace(mock_config(), model_path=str(tmp_path)))


def test_the_mock_takes_times_and_pool_from_a_profile():
    config = replace(mock_config(), executor_options={"profile": "h100/llama-3-8b", "page_size": 16})
    assert load_executor(config).info.num_pages > 1000
