"""Loads a model over several ranks and returns its executor."""

import logging
from typing import Any

import torch

from tokenyard.executor.distributed.pipeline import PipelineExecutor, PipelineStage
from tokenyard.executor.distributed.rank0 import ModelRanks, Rank0Executor, TensorParallelExecutor
from tokenyard.executor.distributed.remote_nodes import MultiNodeConfig
from tokenyard.executor.distributed.tensor_parallel import TensorParallelShard
from tokenyard.executor.model_loader import load_executor as load_part
from tokenyard.executor.runner import ModelExecutor
from tokenyard.executor.warm_up import warm_up

logger = logging.getLogger(__name__)


def load_executor(
    model_path: str,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    nodes: dict[str, Any] | None = None,
    share_kv: bool = False,
    **options: Any,
) -> Rank0Executor:
    """Load a model over ranks, each a process: `tp_size` that share every layer, or `pp_size` stages.

    nodes: fields of `MultiNodeConfig` if some ranks are on other machines.
    share_kv: whether KV is moved or stored, which needs all of it in this machine's memory.
    options: those of `model_loader.load_executor`.

    Raises ConfigError and EngineDeadError, naming the rank at fault.
    """
    size = max(tp_size, pp_size)
    terms = MultiNodeConfig(**nodes) if nodes else None
    here = size // terms.count if terms is not None else size
    threads = options.get("threads") or torch.get_num_threads()
    options = options | {"threads": max(1, threads // here)}
    ranks = ModelRanks(model_path, size, options, "tensor" if tp_size > 1 else "pipeline", terms, share_kv=share_kv)
    if terms is not None:
        options["nodes"] = terms.count

    def tensor_parallel(*parts: Any) -> ModelExecutor:
        return TensorParallelExecutor(ranks, *parts)

    def pipeline(*parts: Any) -> ModelExecutor:
        return PipelineExecutor(ranks, stage, *parts)

    try:
        stage = PipelineStage(0, size, ranks.group, ranks.agree)
        if ranks.form == "tensor":
            shard = TensorParallelShard(0, size, ranks.group, ranks.agree)
            executor = load_part(model_path, **options, part=shard, make=tensor_parallel)
        else:
            executor = load_part(model_path, **options, part=stage, make=pipeline)
        ranks.connect(torch.device(executor.info.device))
        executor.capture()
        if executor.info.device != "cpu":
            # The last stage of a pipeline computes a step when it is collected.
            warm_up(executor, executor.collect)
    except BaseException:
        ranks.close()
        raise
    assert isinstance(executor, Rank0Executor)
    way = "layer by layer" if ranks.form == "tensor" else "in stages"
    on_cpu = executor.info.device == "cpu"
    logger.info(
        "the model is divided among %d ranks and computed %s%s",
        *(size, way, "; on a CPU that tests exactness, and is slower than one rank" if on_cpu else ""),
    )
    return executor
