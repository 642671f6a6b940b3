"""Loading: layouts of checkpoints that work, and one clear line for those that do not."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.executor.driver import Driver
from tests.executor.tiny_models import greedy, judge, prompt_of
from tokenyard.base import ConfigError
from tokenyard.executor.cuda_devices import choose_device, prepare_cuda
from tokenyard.executor.distributed.tensor_parallel import TensorParallelShard
from tokenyard.executor.hf_hub import resolve_model_path
from tokenyard.executor.kv_pool import choose_num_pages, kv_bytes_per_token
from tokenyard.executor.layer_loader import read_folder_config
from tokenyard.executor.load_options import choose_dtype
from tokenyard.executor.model_loader import device_of_rank, load_executor
from tokenyard.executor.models.hf_config import read_model_config
from tokenyard.executor.weights import SafetensorsWeights


@pytest.fixture
def copy(folder, tmp_path):
    """A folder of the plain llama that a test may damage."""
    target = tmp_path / "model"
    shutil.copytree(folder("llama"), target)
    return target


def load(path, **options):
    options = {"device": "cpu", "dtype": "float32", "max_total_tokens": 256, "max_pool_rows": 2, **options}
    return load_executor(str(path), **options)


def edit_config(folder, **fields):
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "drop"}))


def assert_runs_as_the_judge(executor):
    prompt = prompt_of(20, seed=1)
    driver = Driver(executor)
    assert driver.generate(driver.start(prompt), 5) == greedy("llama", prompt, 5)


def refused(path, match, **options):
    with pytest.raises(ConfigError, match=match) as caught:
        load(path, **options)
    assert "\n" not in caught.value.message


def test_a_sharded_checkpoint(copy):
    shutil.rmtree(copy)
    judge("llama").save_pretrained(copy, max_shard_size="50KB")
    assert len(list(copy.glob("*.safetensors"))) > 1
    assert_runs_as_the_judge(load(copy))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_checkpoint_is_converted(copy, dtype):
    path = copy / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)
    assert load(copy).info.dtype == "float32"


def test_an_old_config_reads_like_a_new_one(copy):
    new = read_folder_config(copy)
    edit_config(copy, rope_parameters="drop", rope_theta=10000.0, rope_scaling=None, head_dim="drop", dtype="drop")
    edit_config(copy, torch_dtype="float32")
    assert read_folder_config(copy) == new
    assert_runs_as_the_judge(load(copy))


def test_old_rope_scaling():
    raw = json.loads((Path(__file__).parent / "old_config.json").read_text())
    rope = read_model_config(raw).rope
    assert (rope.kind, rope.factor, rope.theta, rope.original_context) == ("llama3", 32.0, 500000.0, 8192)


def test_context_grows_with_yarn(copy):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    edit_config(copy, rope_parameters="drop", rope_scaling=scaling, rope_theta=10000.0)
    assert read_folder_config(copy).context_length == 1024


def test_eos_ids_of_both_files(copy):
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    edit_config(copy, eos_token_id=3)
    assert load(copy).info.eos_token_ids == (7, 2, 3)


def test_dummy_weights_need_a_config_alone_and_repeat(copy):
    (copy / "model.safetensors").unlink()
    prompt = prompt_of(20, seed=1)
    answers = []
    for seed in (0, 0, 1):
        driver = Driver(load(copy, load_format="dummy", seed=seed))
        answers.append(driver.generate(driver.start(prompt), 6))
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


def test_info_has_pages_and_bytes(copy):
    info = load(copy, page_size=16, max_total_tokens=100).info
    assert (info.page_size, info.num_pages, info.max_pool_rows) == (16, 6, 2)
    assert info.kv_bytes_per_token == 3 * 2 * 2 * 12 * 4
    assert (info.vocab_size, info.context_length, info.device) == (199, 256, "cpu")
    assert load(copy, context_length=100).info.context_length == 100


def test_the_cpu_default_pool_is_modest_and_says_so(copy, caplog):
    caplog.set_level("INFO")
    info = load(copy, max_total_tokens=None).info
    assert info.num_pages == 32768
    assert "max_total_tokens" in caplog.text


def test_the_cuda_pool_leaves_its_share_free(copy, monkeypatch):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (60_000, 100_000))
    config = read_folder_config(copy)
    sizes = {"page_size": 4, "dtype": torch.float16, "device": torch.device("cuda"), "max_total_tokens": None}
    per_token = kv_bytes_per_token(config, torch.float16)
    pages = choose_num_pages(config, mem_fraction_static=0.75, **sizes)
    assert pages == 35_000 // per_token // 4
    # The share is that of all the engine takes, its steps and graphs included.
    assert (
        choose_num_pages(config, mem_fraction_static=0.75, reserved_bytes=15_000, **sizes) == 20_000 // per_token // 4
    )
    for share, match in ((0.3, "less than one page"), (0.0, "above 0"), (1.2, "at most 1")):
        with pytest.raises(ConfigError, match=match):
            choose_num_pages(config, mem_fraction_static=share, **sizes)


def test_unused_tensors_are_named(copy, caplog):
    path = copy / "model.safetensors"
    save_file({**load_file(path), "model.extra.weight": torch.zeros(3)}, path)
    load(copy)
    assert "model.extra.weight" in caplog.text


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported: its layers keep states"),
        ({"architectures": ["BertModel"]}, "BertModel.* not supported; supported are LlamaForCausalLM"),
        ({"architectures": "drop"}, "architecture missing"),
        ({"hidden_size": "drop"}, "hidden_size is None"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_key_value_heads": 3}, "cannot share 3"),
        ({"head_dim": 7}, "even head_dim"),
        ({"num_key_value_heads": "many"}, "wrong type.*many"),
        ({"rope_parameters": "x"}, "wrong type"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope needs 6 factors"),
        ({"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, "rope type 'ntk'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'linear' needs a factor above 0, not None"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": -4.0}}, "'yarn' needs a factor above 0, not -4"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq with None bits"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "supported are fp8, gptq"),
        ({"intermediate_size": 64}, "mlp.gate_proj.weight' has shape .80, 48., but config.json means .64, 48."),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": 4}, "no tensor 'model.layers.3"),
    ],
)
def test_a_wrong_config_is_refused(copy, fields, match):
    edit_config(copy, **fields)
    refused(copy, match)


def test_damaged_folders_are_refused(copy):
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    refused(copy, "damaged")
    (copy / "model.safetensors").write_bytes(b"no weights at all")
    refused(copy, "damaged")
    (copy / "model.safetensors").unlink()
    refused(copy, r"no \*.safetensors file")
    (copy / "pytorch_model.bin").touch()
    refused(copy, "pytorch_model.bin is not read, .* convert it to safetensors")
    (copy / "config.json").write_text("{")
    refused(copy, "cannot be read as JSON")
    (copy / "config.json").unlink()
    refused(copy, "config.json does not exist")


def test_an_index_may_not_leave_the_folder(copy):
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(copy, "not in the model folder")
    (copy / "model.safetensors.index.json").write_text("{}")
    refused(copy, "weight_map")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_tensors_are_refused(copy, dtype):
    path = copy / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    save_file(tensors, path)
    refused(copy, str(dtype))


def test_corrections_of_experts_are_not_rounded(tmp_path):
    name, given = "model.layers.3.mlp.gate.e_score_correction_bias", torch.tensor([5.0011, 5.0012])
    save_file({name: given}, tmp_path / "model.safetensors")
    found = SafetensorsWeights(tmp_path, torch.device("cpu"), torch.bfloat16).get(name, (2,))
    assert torch.equal(found.float(), given)


def test_a_missing_folder_and_an_unreachable_name(tmp_path, monkeypatch):
    refused(tmp_path / "nothing", "there is no model folder")
    file = tmp_path / "file"
    file.write_text("")
    refused(file, "is a file")

    def offline(*args, **kwargs):
        raise OSError("no network\nand more lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    refused("someone/some-model", "could not be downloaded: no network")


def test_options_out_of_range_are_refused(copy):
    refused(copy, "dtype 'int4'", dtype="int4")
    refused(copy, "load_format 'gguf'", load_format="gguf")
    refused(copy, "device 'quantum'", device="quantum")
    refused(copy, "less than one page", page_size=64, max_total_tokens=63)
    refused(copy, "page_size 0", page_size=0)
    refused(copy, "context_length is 257", context_length=257)
    if not torch.cuda.is_available():
        refused(copy, "torch sees 0", device="cuda")


def test_auto_dtype_follows_the_device(copy, monkeypatch):
    config = read_folder_config(copy)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr("tokenyard.executor.load_options.cpu_has_bfloat16", lambda: True)
    assert choose_dtype("auto", cpu, config) == torch.bfloat16
    monkeypatch.setattr("tokenyard.executor.load_options.cpu_has_bfloat16", lambda: False)
    assert choose_dtype("auto", cpu, config) == torch.float32
    assert choose_dtype("auto", cuda, config) == torch.bfloat16


def test_a_pool_beyond_memory_is_refused(copy):
    refused(copy, "does not fit.*smaller --max-total-tokens", max_total_tokens=10**13)


def test_a_device_has_one_name(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [str(choose_device(name)) for name in ("auto", "cuda", "cuda:1", "cpu")] == [
        "cuda:0",
        "cuda:0",
        "cuda:1",
        "cpu",
    ]
    with pytest.raises(ConfigError, match="sees 2 CUDA devices"):
        choose_device("cuda:2")


def test_ranks_of_a_divided_model_have_a_gpu_each(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    shards = [TensorParallelShard(rank, 2, None, None) for rank in range(2)]
    places = [device_of_rank("auto", rank, 2, shard) for rank in range(2) for shard in shards]
    assert places == [(torch.device("cuda", place), 1) for place in range(4)]
    with pytest.raises(ConfigError, match="--tp-size and --dp-size ask for 6 CUDA devices, but torch sees 4"):
        device_of_rank("auto", 0, 3, shards[0])
    on_two_nodes = [
        device_of_rank("auto", 0, 1, TensorParallelShard(rank, 8, None, None), nodes=2)[0].index for rank in range(8)
    ]
    assert on_two_nodes == [0, 1, 2, 3] * 2


def test_a_gpu_computes_exactly_and_needs_no_graph_per_length(monkeypatch):
    chosen, cudnn, precision = [], torch.backends.cuda.cudnn_sdp_enabled(), torch.get_float32_matmul_precision()
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    torch.set_float32_matmul_precision("high")
    try:
        prepare_cuda(torch.device("cuda:1"))
        assert chosen == [torch.device("cuda:1")]
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        torch.set_float32_matmul_precision(precision)


@pytest.mark.parametrize("name", ["tokenizer.json", "model-00001-of-00002.safetensors"])
def test_pointers_of_git_lfs_are_named(tmp_path, name):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(ConfigError, match="git lfs pull"):
        resolve_model_path(str(tmp_path))
