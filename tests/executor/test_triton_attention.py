"""The Triton attention against float64, over shuffled pages with poison all around."""

import numpy as np
import pytest
import torch

from tests.executor.tiny_models import DEVICE
from tests.executor.triton_available import need_triton

need_triton()

from tests.executor.checked_backends import CheckedAttention  # noqa: E402
from tests.executor.fake_varlen import pretend_varlen  # noqa: E402
from tokenyard.executor.attention.backend import AttentionSpec  # noqa: E402
from tokenyard.executor.attention.triton.backend import FEW_QUERIES, TritonAttention, cut  # noqa: E402
from tokenyard.executor.forward_batch import Bucket, ForwardBatch, PageTable  # noqa: E402
from tokenyard.executor.kv_pool import KV_BYTES, KvPool  # noqa: E402
from tokenyard.executor.models.hf_config import read_model_config  # noqa: E402

ONE_LAYER = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}


class Step:
    """One layer over random rows: (tokens in the cache, queries) each, decode rows first. What no row owns is NaN."""

    def __init__(self, rows, *, heads=4, kv_heads=2, head_dim=16, page_size=1, seed=0, dtype=torch.float32):
        draw = np.random.default_rng(seed)
        longest = max(start + count for start, count in rows)
        pages_each = -(-longest // page_size)
        shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
        config = read_model_config({**ONE_LAYER, **shape}, None)
        device = torch.device(DEVICE)
        self.pool = KvPool(config, len(rows) * pages_each, page_size, device, dtype)
        self.pages = PageTable(len(rows) + 2, longest, page_size, device)
        # 0xff is NaN in each part of it: a number of fp8, and a scale.
        self.pool.tensor.fill_(float("nan") if self.pool.kind is None else 0xFF)
        places = draw.permutation(len(rows) + 2)[: len(rows)]
        ids = draw.permutation(len(rows) * pages_each) + 1
        tokens = sum(count for _, count in rows)
        torch.manual_seed(seed)
        for (start, count), row, own in zip(rows, places, ids.reshape(len(rows), -1), strict=True):
            used = -(-(start + count) // page_size)
            self.pages.tensor[row, :used] = torch.from_numpy(own[:used]).to(device, torch.int32)
            slots = self.pages.slots(torch.tensor(int(row)), torch.arange(start)).long()
            if not start:
                continue
            cached = torch.randn(1, 2, start, kv_heads, head_dim, device=device)
            self.pool.tensor[:, :, slots] = cached.to(dtype) if self.pool.kind is None else in_bytes(cached, dtype)
        starts, counts = (np.array(column) for column in zip(*rows, strict=True))
        positions = np.concatenate([np.arange(start, start + count) for start, count in rows])
        pool_rows = torch.from_numpy(np.repeat(places, counts)).to(device)
        positions = torch.from_numpy(positions).to(device)
        self.batch = ForwardBatch(
            token_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
            positions=positions,
            slots=self.pages.slots(pool_rows, positions).long(),
            pool_rows=pool_rows,
            logit_tokens=torch.arange(0, device=device),
            starts=starts,
            counts=counts,
            decode_rows=next((i for i, count in enumerate(counts) if count > 1), len(rows)),
        )
        # As a layer has it: queries, keys and values are parts of one product.
        qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, device=device)
        qkv = qkv.to(dtype) if self.pool.kind is None else qkv
        self.qkv = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        self.heads = heads

    def check(self, window=0, softcap=0.0, sinks=False, tolerance=2e-6, varlen=False):
        sink = (torch.randn(self.heads, device=self.batch.positions.device),) if sinks else ()
        spec = AttentionSpec((window,), self.qkv[0].shape[2] ** -0.5, softcap, sink)
        backend = TritonAttention(self.pool, self.pages, spec, self.heads, self.qkv[0].dtype, varlen=varlen)
        judged = CheckedAttention(backend, self.pool, self.pages, spec, tolerance)
        judged.prepare(self.batch)
        return judged.forward(0, *self.qkv, self.batch)


def in_bytes(x, kind):
    """Heads of numbers with their scale behind them, rounded by torch; see KvPool."""
    most = MOST[str(kind).removeprefix("torch.")]
    scales = x.abs().amax(-1, keepdim=True) / most
    scaled = (x / scales).clamp(-most, most)
    codes = (scaled.round() if kind == torch.int8 else scaled).to(kind)
    return torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), dim=-1)


MOST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
KINDS = {
    "one decode": [(0, 1)],
    "decodes": [(5, 1), (63, 1), (64, 1), (299, 1), (0, 1)],
    "long decode": [(1100, 1), (3, 1)],
    "a prompt": [(0, 70)],
    "a chunk on a prefix": [(300, 33)],
    "drafts": [(40, 1), (17, 4), (530, 3)],
    "all": [(70, 1), (9, 1), (600, 2), (0, 1 + FEW_QUERIES), (31, 50), (0, 5)],
}


@pytest.mark.parametrize("rows", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    "how",
    [{}, {"window": 24}, {"softcap": 3.0}, {"sinks": True}, {"window": 200, "softcap": 5.0, "sinks": True}],
    ids=str,
)
def test_attention_is_that_of_float64(rows, how):
    Step(rows).check(**how)


@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 128, 200, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (14, 2), (8, 1)])
def test_any_head_size_and_group(head_dim, heads, kv_heads):
    Step([(33, 1), (20, 3), (5, 20)], heads=heads, kv_heads=kv_heads, head_dim=head_dim, page_size=16).check()


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_any_page_size(page_size):
    Step(KINDS["all"], page_size=page_size).check(window=40)


@pytest.mark.parametrize("kind", KV_BYTES.values(), ids=KV_BYTES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"), [(4, 2, 16, 1), (14, 2, 64, 16), (3, 1, 40, 4), (8, 4, 128, 1)]
)
def test_keys_and_values_of_one_byte(kind, heads, kv_heads, head_dim, page_size):
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size}
    step = Step([(9, 1), (270, 2), (0, 18)], dtype=kind, **shape)
    step.check(window=60 if kv_heads == 1 else 0, sinks=page_size == 4)


@pytest.mark.parametrize("kind", KV_BYTES.values(), ids=KV_BYTES)
def test_a_number_that_is_none_stays_none(kind):
    step = Step([(20, 1)], dtype=kind)
    q, _, v = step.qkv
    v[0, 1, 3] = float("nan")
    spec = AttentionSpec((0,), 0.25)
    backend = TritonAttention(step.pool, step.pages, spec, step.heads, q.dtype)
    backend.prepare(step.batch)
    found = backend.forward(0, *step.qkv, step.batch).view(4, 16)
    assert found.isnan().all(1).tolist() == [False, False, True, True]


def test_a_row_does_not_depend_on_its_neighbours():
    alone, among = Step([(333, 1)]), Step([(333, 1), (5, 1), (700, 1), (0, 40)], seed=1)
    row, place = int(among.batch.pool_rows[0]), int(alone.batch.pool_rows[0])
    for position in range(333):
        slots = [int(step.pages.tensor[r, position]) for step, r in ((among, row), (alone, place))]
        among.pool.tensor[:, :, slots[0]] = alone.pool.tensor[:, :, slots[1]]
    for mine, other in zip(among.qkv, alone.qkv, strict=True):
        mine[:1] = other[:1]
    assert torch.equal(among.check()[:1], alone.check())


def test_blocks_cover_each_query_once():
    firsts, counts = cut(np.array([3, 40]), np.array([37, 8]), 16)
    assert firsts.tolist() == [3, 19, 35, 40]
    assert counts.tolist() == [16, 16, 5, 8]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("how", [{}, {"window": 24, "sinks": True}], ids=str)
def test_a_captured_step_of_rows_of_all_kinds(page_size, how):
    """What fills it up attends to nothing, and decodes have the bits of any other step."""
    rows = [(70, 1), (600, 1), (9, 3), (20, 16), (31, 50), (0, 1), (0, 5)]
    tokens, own = sum(count for _, count in rows), Bucket(96, 16)
    sinks = (torch.randn(4, device=DEVICE),) if how.get("sinks") else ()
    step = Step(rows, page_size=page_size)
    spec = AttentionSpec((how.get("window", 0),), 0.25, 0.0, sinks)
    outputs = []
    for bucket in (None, own):
        backend = TritonAttention(step.pool, step.pages, spec, 4, torch.float32)
        batch, qkv = step.batch, step.qkv
        if bucket is not None:
            backend.plan_bucket(batch, bucket)
            columns = (batch.token_ids, batch.positions, batch.slots, batch.pool_rows)
            padded = [torch.nn.functional.pad(column, (0, bucket.tokens - tokens)) for column in columns]
            batch = ForwardBatch(*padded, batch.logit_tokens, batch.starts, batch.counts, batch.decode_rows)
            batch.bucket = bucket
            qkv = [torch.nn.functional.pad(part, (0, 0, 0, 0, 0, bucket.tokens - tokens)) for part in qkv]
        backend.prepare(batch)
        outputs.append(backend.forward(0, *qkv, batch)[:tokens])
    assert torch.equal(outputs[0][:2], outputs[1][:2])
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(DEVICE != "cpu", reason="a CUDA device has torch's own, which takes no float32")
@pytest.mark.parametrize("window", [0, 24])
def test_prompts_may_be_attended_to_by_torch(monkeypatch, window):
    """Those without a prefix, in one call for all that lie together; the rest of the batch stays Triton's."""
    calls = pretend_varlen(monkeypatch)
    rows = [(70, 1), (600, 2), (0, 1 + FEW_QUERIES), (0, 40), (31, 50), (0, 5), (0, 30)]
    Step(rows, page_size=4).check(window=window, varlen=True)
    own = (window - 1 if window else -1, 0)
    assert calls == [(2, 40, own), (1, 30, own)]
