"""What steps allocate, on tensors without data, against the memory that is kept for them."""

import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.executor.triton_launches import need_compiler, pretended_launches

need_compiler()

from benchmarks.gpu import SHAPES  # noqa: E402
from tests.executor.meta_device import GPU, Weights  # noqa: E402
from tokenyard.executor.device_memory import bucket_bytes, device_memory, step_bytes, varlen_bytes  # noqa: E402
from tokenyard.executor.forward_batch import Bucket, ForwardBatch, PageTable  # noqa: E402
from tokenyard.executor.kv_pool import KvPool  # noqa: E402
from tokenyard.executor.models.decoder import Decoder  # noqa: E402
from tokenyard.executor.models.hf_config import read_model_config  # noqa: E402
from tokenyard.executor.models.model_backend import TorchModel  # noqa: E402

ROWS = 256


class Allocations(TorchDispatchMode):
    """Bytes of the storages that live, and the most there were."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._seen = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return found

    def _count(self, storage):
        if storage in self._seen:
            return
        size = storage.nbytes()
        self._seen[storage] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, size)

    def _free(self, size):
        self.now -= size


def make(name, *, varlen=False):
    from tokenyard.executor.attention.triton.backend import TritonAttention, TritonKernels

    config = read_model_config(SHAPES[name], None)
    pool, pages = KvPool(config, 1, 16, GPU, torch.bfloat16), PageTable(ROWS, 8192, 16, GPU)
    decoder = Decoder(config, Weights(), GPU, 8192)
    attention = TritonAttention(pool, pages, decoder.attention_spec, config.num_heads, decoder.dtype, varlen=varlen)
    decoder.fuse(TritonKernels(attention))
    return config, TorchModel(decoder, attention)


def batch(counts, decode_rows, logits):
    tokens = int(counts.sum())
    columns = torch.zeros(4, tokens, dtype=torch.int64, device=GPU)
    chosen = torch.zeros(logits, dtype=torch.int64, device=GPU)
    return ForwardBatch(*columns.unbind(), chosen, np.zeros(len(counts), np.int64), counts, decode_rows)


STEPS = {
    "a chunk of 8192": (np.array([8192]), 0),
    "256 decodes": (np.ones(ROWS, np.int64), ROWS),
    "drafts of 256 rows": (np.full(ROWS, 5), 0),
    "ends of 256 prompts": (np.full(ROWS, 16), 0),
    "decodes and a chunk": (np.array([1] * 255 + [8192]), 255),
}


@pytest.mark.parametrize("name", SHAPES)
def test_steps_allocate_what_is_kept_for_them(name, monkeypatch):
    monkeypatch.setattr("tokenyard.executor.cuda_streams.uploaded", lambda host, device: host.to(device))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    config, model = make(name)
    for kind, (counts, decode_rows) in STEPS.items():
        rows = min(ROWS, int(counts.sum()))
        with pretended_launches(), torch.inference_mode(), Allocations() as allocations:
            logits = model.step(batch(counts, decode_rows, rows))
        kept = step_bytes(config, int(counts.sum()), rows, 2)
        assert logits.shape == (rows, config.vocab_size)
        assert allocations.peak <= kept, kind
        # Not so much that the pool would be needlessly small.
        assert kept - allocations.peak < 1.5e9, kind
        del logits
        model.states = None


@pytest.mark.parametrize("name", SHAPES)
def test_prompts_by_varlen_allocate_what_is_kept_for_them(name, monkeypatch):
    monkeypatch.setattr("tokenyard.executor.cuda_streams.uploaded", lambda host, device: host.to(device))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    config, model = make(name, varlen=True)
    with pretended_launches(), torch.inference_mode(), Allocations() as allocations:
        model.step(batch(np.array([8192]), 0, ROWS))
    more = varlen_bytes(config, 8192, 2)
    assert 0 < more < 0.1e9
    assert allocations.peak <= step_bytes(config, 8192, ROWS, 2) + more


@pytest.mark.parametrize("name", SHAPES)
def test_a_captured_step_of_rows_of_all_kinds_allocates_what_is_kept_for_it(name, monkeypatch):
    monkeypatch.setattr("tokenyard.executor.cuda_streams.uploaded", lambda host, device: host.to(device))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    config, model = make(name)
    step, bucket = batch(np.array([512]), 0, 0), Bucket(512, 512)
    step.bucket = bucket
    with pretended_launches(), torch.inference_mode():
        model.attention.plan_bucket(step, bucket)
        with Allocations() as allocations:
            model.layers(step)
    assert 0.5 < allocations.peak / bucket_bytes(config, bucket.tokens, 2) <= 1


def test_packed_experts_allocate_nothing_but_what_they_find():
    from tokenyard.executor.attention.triton.expert_kernels import PackedExperts, multiply_groups

    numbers = torch.zeros(128, 1536, 16, 128, dtype=torch.uint8, device=GPU)
    weights = PackedExperts(numbers, torch.zeros(128, 1536, 16, device=GPU), None, torch.float8_e4m3fn)
    x, ends = torch.zeros(8192 * 8, 2048, dtype=torch.bfloat16, device=GPU), torch.zeros(128, device=GPU).int()
    with pretended_launches(), torch.inference_mode(), Allocations() as allocations:
        multiply_groups(x, weights, None, ends)
    assert allocations.peak == len(x) * 1536 * 2


@pytest.mark.parametrize(
    ("device_gb", "name", "least_tokens"),
    [(24, "Llama-3-8B", 2e4), (80, "Llama-3-8B", 3.5e5), (141, "Llama-3-8B", 7e5)],
)
def test_devices_have_room_for_kv(device_gb, name, least_tokens):
    config = read_model_config(SHAPES[name], None)
    sizes = (1, 2, 4, *range(8, 257, 8))
    need = device_memory(
        config,
        torch.bfloat16,
        max_step_tokens=8192,
        max_pool_rows=ROWS,
        context_length=8192,
        page_size=1,
        captured=sizes,
    )
    weights = 16.1e9
    left = device_gb * 1e9 * 0.9 - weights - need.total
    assert left / (config.kv_values_per_token * 2) > least_tokens
