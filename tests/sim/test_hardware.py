"""Step time and KV capacity from a model's configuration and a device's data sheet."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import silicon
from tests.sim.small_workloads import setup, workload
from tokenyard.base import ConfigError, StepWork
from tokenyard.sim import Engine
from tokenyard.sim.hardware import kernel_tables
from tokenyard.sim.hardware.device_profile import Hardware, find_device_profile
from tokenyard.sim.hardware.devices import device_names, find_device
from tokenyard.sim.hardware.known_models import known_models
from tokenyard.sim.hardware.measured_errors import measured_error
from tokenyard.sim.hardware.model_shape import find_model, read_shape
from tokenyard.sim.hardware.roofline import Efficiency, Parallel, Roofline
from tokenyard.sim.simulate import simulate
from tokenyard.tape.codec import Tape
from tokenyard.tape.replay import replay

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 8.03, 131_072),
        ("Qwen/Qwen3-32B", 32.8, 262_144),
        ("Qwen/Qwen3-235B-A22B", 235.1, 192_512),
        ("deepseek-ai/DeepSeek-V3", 671.0, 70_272),
        ("mistralai/Mixtral-8x7B-v0.1", 46.7, 131_072),
        ("openai/gpt-oss-120b", 116.8, 36_864),
    ],
)
def test_known_models_have_their_published_sizes(name, billions, kv_bytes):
    shape = find_model(name)
    assert shape.total_params / 1e9 == pytest.approx(billions, rel=0.002)
    assert shape.kv_bytes_per_token() == kv_bytes


@pytest.mark.parametrize("model", known_models())
def test_every_known_model_has_step_times(model):
    profile = find_device_profile("b200_sxm", model, Hardware(tp=8, weights="nvfp4"))
    few, many = (profile.cost().step(StepWork(n, n, n, n * 1000)) for n in (1, 64))
    assert 0.0 < few < many < 1.0


def test_a_configuration_is_read_from_a_file_or_its_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert find_model(str(tmp_path)) == find_model(str(tmp_path / "config.json"))
    assert find_model(str(tmp_path)).kv_bytes_per_token() == 4 * 2 * 2 * 16 * 2


def test_nested_text_configurations_are_read():
    assert read_shape({"text_config": TINY}, "a", "a") == read_shape(TINY, "a", "a")


def test_windows_keep_kv_for_their_window_only():
    mixed = TINY | {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}
    shape, full = read_shape(mixed, "a", "a"), read_shape(TINY, "a", "a")
    assert shape.family == "window"
    assert shape.kv_bytes_per_token() == full.kv_bytes_per_token() // 2
    assert shape.fixed_kv_bytes(10) == 10 * 32 * shape.kv_bytes_per_token()


def test_gemma_4_has_experts_beside_its_mlp_and_other_heads_in_layers_without_a_window():
    gemma = TINY | {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 16}
    gemma |= {"global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    gemma |= {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16}
    shape = read_shape({"text_config": gemma}, "a", "a")
    assert shape.family == "window-moe"
    assert shape.kv_bytes_per_token() == 2 * 2 * 32 * 2
    attention = 64 * 16 * (4 * 2 + 2 * 2) + 64 * 32 * (4 * 2 + 1)
    assert shape.total_params == 2 * 64 * 100 + 2 * attention + 4 * (64 * 8 + 3 * 64 * 128 + 8 * 3 * 64 * 16)


def test_recurrent_states_take_a_fixed_place():
    hybrid = TINY | {"full_attention_interval": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    shape = read_shape(hybrid | {"linear_value_head_dim": 16}, "a", "a")
    assert shape.family == "hybrid"
    state, conv = 4 * 16 * 16 * 4, 3 * (2 * 4 + 4) * 16 * 2
    assert shape.fixed_kv_bytes(1) == shape.state_slot_bytes() == 2 * (state + conv)


def test_latents_are_on_every_device_and_heads_are_divided():
    assert find_model("deepseek-v3").kv_bytes_per_token(8) == find_model("deepseek-v3").kv_bytes_per_token(1)
    assert find_model("llama-3.1-70b").kv_bytes_per_token(8) * 8 == find_model("llama-3.1-70b").kv_bytes_per_token(1)


def test_layers_named_one_by_one_are_latent_where_the_model_is():
    model = TINY | {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    named = model | {"layer_types": ["deepseek_sparse_attention"] * 3 + ["full_attention"]}
    assert read_shape(named, "a", "a") == read_shape(model, "a", "a")


@pytest.mark.parametrize(
    ("quantized", "bits"),
    [
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "awq", "bits": 4}, 4.5),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4}}}}, 4.5),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "something"}, 16),
    ],
)
def test_types_of_weights(quantized, bits):
    assert read_shape(TINY | {"quantization_config": quantized}, "a", "a").weight_bits == bits


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "has no hidden_size"),
        (TINY | {"hidden_size": "64"}, "must be a whole number"),
        (TINY | {"num_attention_heads": 0}, "must be above 0"),
        (TINY | {"hybrid_override_pattern": "M*"}, "not modelled"),
        (TINY | {"num_kv_shared_layers": 2}, "not modelled"),
        (TINY | {"layers_block_type": ["mamba", "moe", "attention", "moe"]}, "layers of type 'moe' are not modelled"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        read_shape(config, "a", "some file")


def test_an_unknown_model_or_device_lists_the_known_ones():
    with pytest.raises(ConfigError, match="qwen3-32b"):
        find_model("nobody/nothing")
    with pytest.raises(ConfigError, match="did you mean qwen3-32b"):
        find_model("Qwen/Qwen3-32")
    with pytest.raises(ConfigError, match="b200_sxm"):
        find_device("abacus")


def test_a_model_that_does_not_fit_says_what_to_do():
    with pytest.raises(ConfigError, match="--tp-size"):
        find_device_profile("l4", "llama-3.1-70b", Hardware())
    with pytest.raises(ConfigError, match="does not divide the 64 attention heads"):
        find_device_profile("h100", "llama-3.1-70b", Hardware(tp=3))


def test_the_kv_pool_of_a_known_deployment():
    # vLLM's own estimate of this deployment, by NVIDIA's tables, is 432,992 tokens.
    profile = find_device_profile("h100_sxm", "llama-3.1-8b", Hardware())
    assert profile.kv_pool_tokens == pytest.approx(432_992, rel=0.03)
    half = find_device_profile("h100_sxm", "llama-3.1-8b", Hardware(kv_type="fp8"))
    assert half.kv_pool_tokens == pytest.approx(2 * profile.kv_pool_tokens, rel=0.01)


def test_more_devices_make_a_step_shorter_but_not_in_proportion():
    one, four = (find_device_profile("h100", "qwen3-32b", Hardware(tp=tp, weights="fp8")).cost() for tp in (1, 4))
    step = StepWork(32, 32, 32, 32 * 2000)
    assert one.step(step) / 4 < four.step(step) < one.step(step)


def test_a_built_in_profile_stays_unless_a_flag_says_more():
    assert find_device_profile("h100", "llama-3-8b").table is None
    assert find_device_profile("h100", "llama-3-8b", Hardware()).table is not None


def test_every_profile_says_how_far_it_is_off():
    for device in device_names():
        profile = find_device_profile(device, "qwen3-0.6b", Hardware())
        assert "measured" in profile.measured


def test_a_tape_of_a_table_replays_without_the_model():
    profile = find_device_profile("b200", "qwen3-0.6b", Hardware())
    chosen = replace(setup(settings={"schedule_policy": "slo", "step_budget": "time"}), profile=profile)
    tape = io.BytesIO()
    simulate(workload(*((0.01 * i, 100 * i + 1, 20) for i in range(20))), chosen, tape=tape)
    report = replay(Tape(tape.getvalue(), "tape"))
    assert report.difference is None
    assert report.equal == report.plans > 0


def test_the_python_api_takes_any_model():
    engine = Engine(device="b200", model="qwen3-0.6b", hardware=Hardware(tp=2, engine="sglang"))
    assert (engine.cost_profile.device, engine.cost_profile.tp) == ("b200_sxm", 2)
    assert "sglang" in engine.cost_profile.source


def test_the_closed_form_of_a_loop_agrees_with_the_scheduler_in_it():
    deployment = silicon.Deployment("qwen3-0.6b", "", "h100_sxm", "vllm", silicon.Parallel())
    run = silicon.Run("a run", deployment, 512, 256, 8, drawn_lengths=False, ttft_ms=1.0, tpot_ms=1.0)
    simulated, estimated = silicon.one(run), silicon.one_in_closed_form(run)
    assert simulated == pytest.approx(estimated, rel=0.25)


def test_the_flags_of_a_server_are_those_of_its_script_on_the_day():
    row = {"model_path": "MiniMaxAI/MiniMax-M2.5", "system": "b200_sxm", "gemm_quant_mode": "fp8"}
    early, late = (row | {"silicon_data_source": f"db-dump/x; measured=2026-{day}T0"} for day in ("03-11", "04-22"))
    assert silicon.flags_of(early) == silicon.Flags(memory=0.95)
    assert silicon.flags_of(late) == silicon.Flags(8, 0)
    assert silicon.flags_of(late | {"model_path": "Qwen/Qwen3-32B"}) == silicon.Flags()


def test_a_correction_finds_a_power_of_the_clients_and_no_more_than_the_runs_show():
    def result(clients: int, error: float) -> silicon.Result:
        deployment = silicon.Deployment("a", "", "h100_sxm", "vllm", silicon.Parallel())
        run = silicon.Run(f"{clients}", deployment, 512, 256, clients, False, 100.0 * error, 10.0)
        return silicon.Result(run, 100.0, 10.0)

    found = silicon.correction_of([result(clients, clients**0.5) for clients in (1, 2, 4, 8, 16, 32, 64, 128)] * 3)
    assert found.of(result(32, 1.0).run) == pytest.approx([32**0.5, 1.0], rel=0.1)
    assert silicon.correction_of([result(8, 1.5)]).of(result(64, 1.0).run) == pytest.approx([1.5, 1.0])


def test_a_label_of_all_devices_is_read_as_its_parts():
    row = {"tp_size": "4", "attention_dp_size": "4", "moe_tp_size": "1", "moe_ep_size": "16"}
    assert silicon.parallel_of(row) == silicon.Parallel(1, 4, 4)
    assert silicon.parallel_of(row | {"attention_dp_size": "1", "moe_ep_size": "4"}) == silicon.Parallel(4, 1, 4)
    with pytest.raises(ConfigError, match="does not match"):
        silicon.parallel_of(row | {"attention_dp_size": "1", "moe_tp_size": "2", "moe_ep_size": "1"})


def test_measured_kernels_say_what_to_install(monkeypatch):
    monkeypatch.setattr(kernel_tables, "PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(ConfigError, match=r"pip install 'tokenyard\[hardware\]'"):
        find_device_profile("h200", "qwen3-32b", Hardware(tp=2, engine="vllm@current"))


def test_an_error_is_that_of_its_row_or_names_the_nearest():
    own = measured_error("dense", find_device("h100"), "vllm")
    assert own.endswith("of dense models on h100_sxm with vllm")
    assert measured_error("dense", find_device("a100"), "vllm").startswith("not measured here, nearest: TTFT")
    assert measured_error("dense", find_device("a100"), "vllm").endswith("of dense models on h100_sxm with vllm")


def test_what_passes_outside_the_scheduler_counts_for_the_first_token_and_the_end():
    profile = find_device_profile("b200", "qwen3-0.6b", Hardware())
    assert profile.request_ms > 0.0
    one = workload((0.0, 1000, 20))
    with_it = simulate(one, replace(setup(), profile=profile))
    without = simulate(one, replace(setup(), profile=replace(profile, request_ms=0.0, request_us_per_token=0.0)))
    added = profile.request_ms / 1e3 + 1000 * profile.request_us_per_token / 1e6
    assert with_it.ttft_s[0] - without.ttft_s[0] == pytest.approx(added)
    assert with_it.e2e_s[0] - without.e2e_s[0] == pytest.approx(added)
    assert with_it.tpot_s[0] == without.tpot_s[0]


def test_uneven_experts_are_read_once_and_tokens_go_to_each_group_once():
    shape, device = find_model("Qwen/Qwen3-30B-A3B"), find_device("h100_sxm")

    def base_ms(tokens, parallel, **changes):
        roofline = Roofline(shape, device, parallel, replace(Efficiency(), **changes))
        return float(roofline.base_ms(np.array([float(tokens)]), chunks=False)[0])

    two = Parallel(1, 2, 2)
    uneven, even = (base_ms(512, two, imbalance=by, compute16=1e6) for by in (1.3, 1.0))
    assert uneven == pytest.approx(even, rel=1e-3), "where each expert is used, none is read more than once"
    uneven, even = (base_ms(2, two, imbalance=by, compute16=1e6) for by in (1.3, 1.0))
    assert uneven > 1.05 * even, "few tokens touch more experts of the busiest device"
    sent_ms = [base_ms(512, Parallel(1, dp, dp), link=1e-3) - base_ms(512, Parallel(1, dp, dp)) for dp in (2, 8, 16)]
    # 8 experts per token: one other group gets it, then seven, then eight.
    assert sent_ms[1] / sent_ms[0] == pytest.approx(7, rel=1e-3)
    assert sent_ms[2] / sent_ms[0] == pytest.approx(8, rel=1e-3)
