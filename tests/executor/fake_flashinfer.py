"""A stand-in for the package flashinfer: the two wrappers that are used, with its signatures, by torch.

Signatures are those of flashinfer-python 0.7.2.post1; what they say of shapes, types and places is checked.
"""

import torch

from tests.executor.meta_device import is_pinned

PLANNED = {}
"""The wrapper that was planned last in some memory, by its address."""


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
    ):
        assert kv_layout == "NHD"
        assert not float_workspace_buffer.any() if float_workspace_buffer.device.type == "cpu" else True
        self.use_tensor_cores = use_tensor_cores
        self.buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        self.captured = use_cuda_graph
        if use_cuda_graph:
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
        self.plan_memory = torch.zeros(8, dtype=torch.uint8)

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        self.plan_memory = int_workspace_buffer

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        pos_encoding_mode="NONE",
        window_left=-1,
        window_right=0,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        data_type=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        non_blocking=True,
        block_tables=None,
        seq_lens=None,
        fixed_split_size=None,
        disable_split_kv=False,
        q_len_per_req=1,
    ):
        queries = torch.arange(len(indptr), dtype=torch.int32)
        if self.captured:
            assert len(last_page_len) == len(self.buffers[2]), "a captured step has one size"
        # A plan lies in memory that all wrappers may share: the last one to be planned there is the one that can run.
        PLANNED[self.plan_memory.data_ptr()] = self
        self.planned = _Planned(queries, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, page_size)
        self.planned.how = window_left, logits_soft_cap or 0.0, q_data_type, kv_data_type, sm_scale
        if self.captured:
            for buffer, column in zip(self.buffers, (indptr, indices, last_page_len), strict=True):
                buffer[: len(column)].copy_(column, non_blocking=non_blocking)

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
    ):
        if self.captured:
            # A replay has no arguments: it reads what lies in the buffers.
            assert PLANNED[self.plan_memory.data_ptr()] is self
            planned = self.planned
            for buffer, column in zip(self.buffers, (planned.indptr, planned.indices, planned.last), strict=True):
                assert torch.equal(buffer[: len(column)], column)
        return self.planned.run(q, paged_kv_cache, out)


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    ):
        assert kv_layout == "NHD"
        assert not use_cuda_graph

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
    ):
        assert causal
        self.planned = _Planned(
            *(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len),
            *(num_qo_heads, num_kv_heads, page_size),
        )
        self.planned.how = window_left, logits_soft_cap or 0.0, q_data_type, kv_data_type, sm_scale

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
    ):
        return self.planned.run(q, paged_kv_cache, out)


class _Planned:
    def __init__(self, queries, indptr, indices, last, heads, kv_heads, page_size):
        self.queries, self.indptr, self.indices, self.last = queries, indptr, indices, last
        self.heads, self.kv_heads, self.page_size = heads, kv_heads, page_size
        for column in (queries, indptr, indices, last):
            assert column.dtype == torch.int32
        assert all(column.device.type == "cpu" for column in (queries, indptr, last)), "plans are made on the host"
        assert len(queries) == len(indptr) == len(last) + 1
        assert len(indices) == indptr[-1]
        assert ((last >= 1) & (last <= page_size)).all()
        # Where the indices are on a device, all else is sent there too.
        if indices.device.type != "cpu":
            assert all(map(is_pinned, (indptr, last)))

    def run(self, q, paged_kv_cache, out):
        keys, values = paged_kv_cache
        window, softcap, q_type, kv_type, scale = self.how
        assert q.is_contiguous()
        assert q.shape[:2] == (self.queries[-1], self.heads)
        assert out.shape == q.shape
        assert (q.dtype, keys.dtype, values.dtype) == (q_type, kv_type, kv_type)
        assert keys.shape[1:] == (self.page_size, self.kv_heads, q.shape[2])
        if q.device.type == "meta":
            return out
        group = self.heads // self.kv_heads
        for row, last in enumerate(self.last.tolist()):
            own = slice(*self.queries[row : row + 2].tolist())
            pages = self.indices[slice(*self.indptr[row : row + 2].tolist())].long()
            length = (len(pages) - 1) * self.page_size + last
            seen = [
                side[pages].flatten(0, 1)[:length].double().repeat_interleave(group, dim=1) for side in (keys, values)
            ]
            scores = torch.einsum("thd,nhd->htn", q[own].double(), seen[0]) * scale
            if softcap:
                scores = (scores / softcap).tanh() * softcap
            # Queries stand at the end of the keys.
            place = torch.arange(length)
            position = place[length - scores.shape[1] :, None]
            hidden = place > position
            if window >= 0:
                hidden |= place < position - window
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[own] = torch.einsum("htn,nhd->thd", weights, seen[1]).to(out.dtype)
        return out
