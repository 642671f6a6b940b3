"""Settings from flags, environment and file."""

import dataclasses

import pytest

from tokenyard.base import ConfigError, SchedulerSettings
from tokenyard.base.declare import declarations
from tokenyard.base.deprecation import accept_old_keys
from tokenyard.base.settings import SharedSettings
from tokenyard.cli.flags import (
    FOREIGN_FLAGS,
    Parser,
    add_deprecated_flag,
    add_setting_flags,
    all_flags,
    parse_count,
    resolve,
    split_help_word,
    unknown_variables,
)
from tokenyard.cli.main import build_parser, main
from tokenyard.config import DEMO_MODEL, Settings

SHARED = dict(declarations(SharedSettings))


def settings(*argv, env=None, word=""):
    parser = Parser(allow_abbrev=False)
    add_setting_flags(parser, word=word)
    return resolve(vars(parser.parse_strictly(argv)), env or {})


@pytest.mark.parametrize(
    ("text", "value"),
    [("8192", 8192), ("8k", 8000), ("8K", 8192), ("1m", 10**6), ("1M", 2**20), ("-1", -1), ("1.5k", 1500)],
)
def test_counts(text, value):
    assert parse_count(text) == value


@pytest.mark.parametrize("text", ["", "x", "8kk", "1.5", "0x10", "1e3"])
def test_invalid_counts(text):
    with pytest.raises(ValueError, match="whole number"):
        parse_count(text)


def test_every_setting_is_declared_once():
    """All that the scheduler reads can be set, but for what follows from the model and the device."""
    own = {item.name for item in dataclasses.fields(SchedulerSettings)} - SHARED.keys()
    assert own == {"context_length", "max_in_flight", "dp_size"}
    for kind in (SchedulerSettings, Settings):
        assert {name: one for name, one in declarations(kind).items() if name in SHARED} == SHARED


def test_precedence_flag_then_environment_then_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("port: 1\nhost: file\nmax-running-requests: 3\n")
    env = {"TOKENYARD_PORT": "2", "TOKENYARD_HOST": "env"}
    resolved = settings("--config", str(file), "--port", "3", env=env)
    chosen = resolved.settings
    assert (chosen.port, chosen.host, chosen.max_running_requests) == (3, "env", 3)
    assert resolved.sources["host"] == "TOKENYARD_HOST"
    assert resolved.sources["port"] == "--port"
    assert "c.yaml" in resolved.sources["max_running_requests"]


def test_config_file_can_come_from_the_environment(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("port: 5\n")
    assert settings(env={"TOKENYARD_CONFIG": str(file)}).settings.port == 5


def test_values_in_a_file_may_be_yaml_values(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("strict_api: true\npolicy-options: {a: 1, b: x}\nmetrics-compat: [sglang, vllm]\ntokenizer: /t\n")
    chosen = settings("--config", str(file)).settings
    assert chosen.strict_api
    assert chosen.policy_options == {"a": 1, "b": "x"}
    assert chosen.metrics_compat == ["sglang", "vllm"]
    assert chosen.tokenizer_path == "/t"


def test_tenants_from_a_separate_file_or_the_config_file(tmp_path):
    tenants, config = tmp_path / "t.yaml", tmp_path / "c.yaml"
    tenants.write_text("acme: {weight: 2}\n'*': {max_queued: 5}\n")
    config.write_text("tenants: {acme: {weight: 3}}\n")
    chosen = settings("--tenants", str(tenants)).settings.tenants
    assert (chosen["acme"].weight, chosen["*"].max_queued) == (2.0, 5)
    assert settings("--config", str(config)).settings.tenants["acme"].weight == 3.0
    tenants.write_text("acme: {weight: heavy}\n")
    with pytest.raises(ConfigError, match="weight"):
        settings("--tenants", str(tenants))


def test_targets_of_service_classes_come_from_the_config_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("slo-classes: {interactive: {ttft_ms: 500, tpot_ms: 30}, flex: {ttft_ms: 60000}}\n")
    chosen = settings("--config", str(file)).settings.slo_classes
    assert (chosen["interactive"].tpot_ms, chosen["flex"].ttft_ms, chosen["flex"].tpot_ms) == (30.0, 60000.0, None)
    with pytest.raises(ConfigError, match="it has no flag: set slo-classes in the --config file"):
        settings("--slo-classes", str(file))


def test_constants_without_a_flag_are_set_in_the_file_or_the_environment(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("clip-max-new-tokens: 8k\n")
    assert settings("--config", str(file)).settings.clip_max_new_tokens == 8000
    assert settings(env={"TOKENYARD_CLIP_MAX_NEW_TOKENS": "16"}).settings.clip_max_new_tokens == 16


def test_help_word_finds_settings_without_a_flag():
    parser = Parser(prog="x")
    add_setting_flags(parser, word="clip-max")
    assert "clip-max-new-tokens: most output tokens set aside" in " ".join(parser.format_help().split())


def test_the_value_of_a_misplaced_key_is_not_shown(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("tenant-keys: [sk-secret]")
    with pytest.raises(ConfigError) as error:
        settings("--config", str(file))
    assert "mapping" in str(error.value)
    assert "sk-secret" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("prot: 1", "did you mean port"),
        ("port: x", "whole number"),
        ("- a", "name: value"),
        ("a: [", "cannot be read"),
        ("slo-classes: {a: {ttft: 5}}", "a has no setting 'ttft'; it has ttft_ms, tpot_ms"),
        ("slo-classes: {a: {ttft_ms: -1}}", "a: ttft_ms is -1"),
        ("slo-classes: {a: {ttft_ms: soon}}", "slo-classes"),
        ("slo-classes: fast", "slo-classes"),
        ("slo-classs: {}", "did you mean slo-classes"),
        ("tenants: {acme: {wieght: 2}}", "acme has no setting 'wieght'"),
        ("tenant-keys: {a: k}", "needs --admin-api-key"),
        ("tenant-keys: {a: k, b: k}\napi-key: x", "every tenant its own key"),
        ("tenant-keys: {a: ''}\napi-key: x", "every tenant its own key"),
    ],
)
def test_wrong_files_are_refused(tmp_path, content, words):
    file = tmp_path / "c.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=words):
        settings("--config", str(file)).settings.effective()


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--model", "m"], "model_path", "m"),
        (["--max-model-len", "4k"], "context_length", 4000),
        (["--gpu-memory-utilization", "0.5"], "mem_fraction_static", 0.5),
        (["--block-size=16"], "page_size", 16),
        (["--max-num-seqs", "7"], "max_running_requests", 7),
        (["--no-enable-prefix-caching"], "disable_radix_cache", True),
        (["--disable-radix-cache", "--enable-prefix-caching"], "disable_radix_cache", False),
        (["--no-async-scheduling"], "disable_overlap_schedule", True),
        (["--enable-mixed-chunk"], "enable_mixed_chunk", True),
        (["--no-enable-mixed-chunk"], "enable_mixed_chunk", False),
        (["--policy-options", "x=1,y=0.5,z=true"], "policy_options", {"x": 1, "y": 0.5, "z": True}),
        (["--service-level-weights", "5,3,1"], "service_level_weights", (5, 3, 1)),
        (["--default-priority-value", "-3"], "default_priority_value", -3),
        (["--cors-allow-origins", "a, b"], "cors_allow_origins", ["a", "b"]),
    ],
)
def test_flags_and_their_aliases(argv, name, value):
    assert getattr(settings(*argv).settings, name) == value


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "x"], "--port: 'x' is not a whole number"),
        (["--dtype", "int3"], "choose from auto, float32"),
        (["--policy-options", "x"], "name=value"),
        (["--metrics-compat", "sglang,x"], "choose from sglang, vllm"),
        (["--max-runing-requests", "1"], "did you mean --max-running-requests"),
        (["--schedule-conservativeness", "nan"], "not a number"),
        (["--api-key", ""], "--api-key is empty"),
        (["--ep-size", "2"], "--ep-size; a model is divided by --tp-size or --pp-size"),
        (["--enable-metrics"], "leave it out: metrics are always there"),
    ],
)
def test_mistakes_say_what_to_do(argv, words):
    with pytest.raises(ConfigError, match=words):
        settings(*argv)


def test_flags_of_other_servers_are_refused():
    own = {option[2:] for flag in all_flags() for option in (*flag.positive, *flag.negative)}
    assert not own & {name for names in FOREIGN_FLAGS.values() for name in names.split()}


def test_variables_that_are_empty_or_come_from_kubernetes_are_refused():
    with pytest.raises(ConfigError, match="TOKENYARD_ADMIN_API_KEY is empty"):
        settings(env={"TOKENYARD_ADMIN_API_KEY": ""})
    with pytest.raises(ConfigError, match="enableServiceLinks"):
        settings(env={"TOKENYARD_PORT": "tcp://10.0.0.1:80"})


@pytest.mark.parametrize("content", ["port: [1", "a: b: c", "\t- x"])
def test_broken_yaml_is_one_line(tmp_path, content):
    file = tmp_path / "c.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"line \d+, column \d+") as error:
        settings("--config", str(file))
    assert "\n" not in error.value.message


TWO_NODES = ("--nnodes", "2", "--tp-size", "2", "--dist-init-addr", "5000")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--mock-step-ms", "1"], "needs --executor mock"),
        (["--tp-size", "2", "--executor", "mock"], "--tp-size divides a model, and --executor mock has none"),
        (["--tp-size", "2", "--pp-size", "2"], "in one way or the other, not both yet"),
        (["--pp-async-batch-depth", "1"], "is for --pp-size 2 and more"),
        (["--node-rank", "1"], "are for --nnodes 2 and more"),
        (["--nnodes", "2", "--dist-init-addr", "5000"], "add --tp-size or --pp-size"),
        (["--nnodes", "2", "--dist-init-addr", "5000", "--tp-size", "3"], "--nnodes 2 does not divide --tp-size 3"),
        (["--nnodes", "2", "--tp-size", "2"], "--nnodes needs --dist-init-addr"),
        (["--nnodes", "2", "--tp-size", "2", "--dist-init-addr", "host"], "needs --dist-init-addr"),
        ([*TWO_NODES, "--disaggregation-mode", "prefill"], "--nnodes divides the KV, so it cannot be moved yet"),
        ([*TWO_NODES, "--enable-hierarchical-cache"], "--nnodes divides the KV, so it cannot be stored yet"),
        (
            ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--enable-hierarchical-cache"],
            "--enable-dp-attention divides the KV, so it cannot be stored yet",
        ),
        ([*TWO_NODES, "--node-rank", "2"], "--node-rank 2 must be below --nnodes 2"),
        ([*TWO_NODES, "--dp-size", "2"], "leave out --dp-size"),
        (
            [*TWO_NODES, "--dist-init-addr", "10.0.0.1:5000"],
            "opens this model to other machines; give all",
        ),
        (["--enable-dp-attention", "--dp-size", "2"], "the same number .* as --dp-size and --tp-size, not 2 and 1"),
        (["--chunked-prefill-size", "100", "--page-size", "16"], "multiple of --page-size"),
        (["--skip-tokenizer-init", "--chat-template", "x"], "contradict"),
        (["--port", "70000"], "--port"),
        (["--log-requests-content"], "add that too"),
        (["--enable-kv-events", "--disable-radix-cache"], "switches off"),
        (["--otlp-traces-endpoint", "host:4318"], "must be like http://host"),
        (["--otlp-traces-endpoint", "http://"], "must be like http://host"),
        (["--otlp-traces-endpoint", "http://host:port/"], "must be like http://host"),
        (["--mem-fraction-static", "1.5"], "--mem-fraction-static"),
        (["--max-total-tokens", str(10**20)], "--max-total-tokens"),
        (["--threads", str(10**20)], "--threads"),
        (["--max-body-mb", "inf"], "--max-body-mb"),
    ],
)
def test_contradictions_are_refused_with_the_reason(argv, words):
    with pytest.raises(ConfigError, match=words):
        settings(*argv).settings.effective()


def test_without_a_model_the_demo_model_is_served():
    chosen = Settings().effective()
    assert chosen.model_path == str(DEMO_MODEL)
    assert chosen.tokenizer_path == str(DEMO_MODEL)
    assert chosen.model_name == "tokenyard-demo"
    assert Settings(model_path="/a/b-7b").effective().model_name == "b-7b"


def test_overlap_is_two_steps_in_flight():
    assert Settings().scheduler_settings(context_length=8).max_in_flight == 2
    assert Settings(disable_overlap_schedule=True).scheduler_settings(context_length=8).max_in_flight == 1


def test_there_are_not_too_many_flags():
    flags = all_flags()
    assert len(flags) <= 140
    options = [option for flag in flags for option in (*flag.positive, *flag.negative)]
    assert len(options) == len(set(options))
    assert all(flag.declared.help_text for flag in flags)


def test_help_word_shows_only_what_it_matches():
    parser = Parser(prog="x")
    add_setting_flags(parser, word="prefix")
    text = parser.format_help()
    assert "--disable-radix-cache" in text
    assert "--port" not in text
    assert "how clients reach it" not in text


def test_help_word_is_split_off():
    assert split_help_word(["serve", "--help", "radix"]) == (["serve", "--help"], "radix")
    assert split_help_word(["serve", "--help=radix"]) == (["serve", "--help"], "radix")
    assert split_help_word(["serve", "--help"]) == (["serve", "--help"], "")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "--prot", "1"], "did you mean --port"),
        (["srve"], "invalid choice"),
        (["serve", "m", "--model", "n"], "given twice"),
        (["calibrate", "m", "--model", "n", "--output", "p.json"], "given twice"),
        (["serve", "--page-size", "0"], "--page-size"),
        (["serve", "--schedule-policy", "fcsf"], "did you mean fcfs"),
        (["serve", "--port", "0", "--radix-eviction-policy", "x"], "lru"),
        (["serve", "--port", "0", "--cost-profile", "h1000/x"], "there is no cost profile"),
        (["generate"], "give a prompt"),
        (["generate", "x", "--temperature", "-1"], "temperature"),
    ],
)
def test_mistakes_end_with_one_line_and_status_two(argv, words, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("tokenyard: ")
    assert words in error
    assert error.count("\n") == 1


def test_every_command_has_help():
    parser = build_parser()
    assert {"serve", "generate", "doctor"} <= set(parser.format_help().split())


def test_unknown_variables_are_reported_except_those_of_kubernetes():
    fine = {"TOKENYARD_PORT": "1", "TOKENYARD_CONFIG": "x", "TOKENYARD_ROUTE_PORT": "1", "TOKENYARD_NATIVE_LEVEL": "1"}
    pods = ("SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT_30000_TCP_ADDR", "ROUTER_SERVICE_PORT", "ROUTER_PORT")
    environ = fine | {f"TOKENYARD_{name}": "tcp://10.0.0.1:30000" for name in pods}
    assert unknown_variables(environ) == []
    (warning,) = unknown_variables({**environ, "TOKENYARD_MAX_RUNING_REQUESTS": "5"})
    assert warning.startswith(
        "TOKENYARD_MAX_RUNING_REQUESTS is no setting; did you mean TOKENYARD_MAX_RUNNING_REQUESTS"
    )


def test_the_help_names_the_policies(capsys):
    assert main(["serve", "--help", "schedule-policy"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name in ("fcfs", "lpm", "slo", "vtc", "adaptive"):
        assert name in shown


def test_a_deprecated_flag_sets_the_new_one_and_warns(caplog):
    parser = Parser(allow_abbrev=False)
    count = parser.add_argument("--max-replicas", type=int, default=4)
    switch = parser.add_argument("--user-policies", action="store_true")
    add_deprecated_flag(parser, "--most", count)
    add_deprecated_flag(parser, "--own-policies", switch)
    assert vars(parser.parse_strictly(["--max-replicas", "3"])) == {"max_replicas": 3, "user_policies": False}
    assert caplog.messages == []
    chosen = parser.parse_strictly(["--most", "2", "--own-policies"])
    assert vars(chosen) == {"max_replicas": 2, "user_policies": True}
    assert [message.split(" is deprecated")[0] for message in caplog.messages] == ["--most", "--own-policies"]
    assert caplog.messages[0].endswith("use --max-replicas")
    assert "--most" not in parser.format_help()
    with pytest.raises(ConfigError, match="invalid int"):
        parser.parse_strictly(["--most", "two"])


def test_deprecated_keys_of_a_file_are_renamed_with_a_warning(caplog):
    renamed = {"most": "max_count"}
    assert accept_old_keys({"most": 2, "price": 1.0}, renamed, "d.yaml") == {"max_count": 2, "price": 1.0}
    (message,) = caplog.messages
    assert "d.yaml: most is deprecated" in message
    assert message.endswith("use max_count")
    assert accept_old_keys({"most": 2, "max_count": 3}, renamed, "d.yaml") == {"most": 2, "max_count": 3}
