"""The estimates of AIConfigurator for the rows of `silicon.py`, in the same tables.

    pip install 'tokenyard[hardware]'
    python benchmarks/silicon_rival.py [--sample N] [--json FILE]

`run_agg` with the kernel tables `current`, a context budget of one prompt, and everything that `silicon.py` knows of a
row: how it was divided, the types of weights and of KV. Where it has no tables for these, the checkpoint's own types
are taken. Of its model for vLLM its authors say that it was calibrated on this very corpus.
"""

import argparse
import csv
import gzip
import logging
from functools import cache
from pathlib import Path
from typing import Any

from aiconfigurator_core.sdk import perf_database
from aiconfigurator_core.sdk.backends.factory import get_backend
from aiconfigurator_core.sdk.config import RuntimeConfig
from aiconfigurator_core.sdk.config_builders import build_model_config
from aiconfigurator_core.sdk.models import (
    get_model,
    resolve_context_fmha_by_data,
    resolve_dsv4_moe_arch,
    resolve_nvfp4_for_system,
)
from silicon import ROWS, Deployment, Result, Run, print_results, read_runs, replay, shuffled

VERSION = "current"
KV_TYPES = {8: "fp8", 16: None}
ITS_NAMES = {
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "zhipuai/GLM-5": "zai-org/GLM-5",
}
"""The package's names of models that it knows by another one."""


@cache
def labels(path: Path) -> dict[str, tuple[str, str]]:
    """The types of dense and expert weights as the rows have them, by id."""
    with gzip.open(path, "rt") as lines:
        return {row["id"]: (row["gemm_quant_mode"], row["moe_quant_mode"]) for row in csv.DictReader(lines)}


@cache
def model_of(deployment: Deployment, gemm: str | None, moe: str | None, kv: str | None) -> tuple[Any, Any, Any]:
    """The package's model of a deployment, its tables, and an engine, which caches by lengths alone: one for each."""
    parallel, system, engine = deployment.parallel, deployment.system, deployment.engine
    name = ITS_NAMES.get(deployment.model, deployment.model)
    view = perf_database.get_database_view(
        system,
        engine,
        perf_database.resolve_query_version(system, engine, VERSION),
        database_mode="SILICON",
        allow_missing_data=False,
    )
    config = build_model_config(
        tp_size=parallel.tp,
        pp_size=1,
        attention_dp_size=parallel.dp,
        moe_tp_size=parallel.tp * parallel.dp // parallel.ep,
        moe_ep_size=parallel.ep,
        gemm_quant_mode=gemm,
        moe_quant_mode=moe,
        kvcache_quant_mode=kv,
    )
    resolve_context_fmha_by_data(config, name, view, engine, is_context_role=True)
    resolve_dsv4_moe_arch(config, name, system_name=system, backend_name=engine)
    resolve_nvfp4_for_system(config, system, name, backend_name=engine)
    return get_model(name, config, engine), view, get_backend(engine)


def estimate(run: Run) -> tuple[float, float] | str:
    """TTFT and TPOT in ms, or why there are none."""
    gemm, moe = labels(ROWS)[run.name]
    kv = KV_TYPES[run.deployment.flags.kv_bits]
    reason = ""
    for types in ((gemm or None, moe or None, kv), (None, None, kv), (None, None, None)):
        try:
            model, view, engine = model_of(run.deployment, *types)
            rows = max(run.clients // run.deployment.parallel.dp, 1)
            runtime = RuntimeConfig(batch_size=rows, isl=run.prompt, osl=run.output)
            found = engine.run_agg(model, view, runtime, ctx_tokens=run.prompt)
            return float(found.get_result_dict()["ttft"]), float(found.get_result_dict()["tpot"])
        except Exception as error:  # the package raises classes of its own, and KeyError where a table is missing
            reason = type(error).__name__
    return f"no estimate ({reason})"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, metavar="N", help="the first N of the rows that silicon.py takes [all]")
    parser.add_argument("--json", type=Path, help="keep what is estimated in a file, and go on from it")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    runs, refused = read_runs(ROWS)
    results = []
    for run, answer in replay(shuffled(runs)[: args.sample], estimate, 1, args.json):
        if isinstance(answer, str):
            refused[answer] = refused.get(answer, 0) + 1
        else:
            results.append(Result(run, *answer))
    print_results(results, refused)


if __name__ == "__main__":
    main()
