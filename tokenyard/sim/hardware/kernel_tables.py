"""Step times from measured kernels: the tables of the package `aiconfigurator-core`, precomputed to a `StepTable`.

The package adds up the times of a model's operations from tables that NVIDIA measured per GPU and engine. A query
takes 150 us, so all are made once. A step that only decodes is the operations of decoding at that batch; a step with
chunks is those of a prompt without its attention, and the attention of each chunk and of the decodes by itself. (The
package's own mixed step leaves out the KV of latent attention, and prices every chunk of a prompt alike.)
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tokenyard.base import ConfigError, StepWork
from tokenyard.cost import Column, Grid, StepTable, TableCost
from tokenyard.cost.linear import LinearTerms
from tokenyard.sim.hardware.devices import Device
from tokenyard.sim.hardware.roofline import Parallel

PACKAGE = "aiconfigurator_core"
ATTENTION = ("attention", "mla_block", "dsa_block", "msa_block")
"""What the names of attention's operations contain."""

HOST_MS = {"vllm": 0.66, "sglang": 2.5}
"""What a step takes beyond its kernels, fitted to measured runs of each engine."""

SLOTS = ("current", "previous", "next")
CHECKED_STEPS = 64
TOKENS = tuple(range(1, 33)) + tuple(sorted({round(32 * 2 ** (i / 6)) for i in range(1, 43)}))
MIXED = tuple(sorted({round(16 * 2 ** (i / 3)) for i in range(32)}))
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024)
CONTEXTS = (16, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
CHUNKS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREFIXES = (0, 512, 2048, 8192, 16384, 32768)


def kernel_table(device: Device, model: str, parallel: Parallel, engine: str, version: str) -> StepTable:
    """The step times of `model`, a name of the package's list or a folder with a `config.json`.

    version: a slot ("current", "previous", "next") or the version that one of them stands for.

    Raises ConfigError if the package is not installed, or has no tables for this deployment.
    """
    try:
        importlib.import_module(PACKAGE)
    except ImportError:
        raise ConfigError(
            f"--engine {engine}@{version} needs measured kernels: pip install 'tokenyard[hardware]', or leave out the "
            "version for a roofline"
        ) from None
    quiet_before = logging.root.manager.disable
    # It warns, dozens of times, of gaps that it fills from tables of other engines; the docs say so once.
    logging.disable(logging.WARNING)
    try:
        return _Operations(device, model, parallel, engine, version).table(HOST_MS.get(engine, 0.0))
    except ConfigError:
        raise
    except Exception as error:  # the package raises classes of its own, and KeyError where a table is missing
        raise ConfigError(
            f"measured kernels have no {model} on {device.name} with {engine}@{version}: {str(error)[:200]}"
        ) from None
    finally:
        logging.disable(quiet_before)


class _Operations:
    """The package's operations of one deployment."""

    def __init__(self, device: Device, model: str, parallel: Parallel, engine: str, version: str) -> None:
        core, sdk = importlib.import_module(PACKAGE), f"{PACKAGE}.sdk."
        database = importlib.import_module(sdk + "perf_database")
        models = importlib.import_module(sdk + "models")
        system = device.name
        self.version = _resolved(database, system, engine, version)
        view = database.get_database_view(
            system, engine, self.version, database_mode="SILICON", allow_missing_data=False
        )
        config = importlib.import_module(sdk + "config_builders").build_model_config(
            tp_size=parallel.tp,
            pp_size=1,
            attention_dp_size=parallel.dp,
            moe_tp_size=parallel.tp * parallel.dp // parallel.ep,
            moe_ep_size=parallel.ep,
            **dict.fromkeys(f"{part}_quant_mode" for part in ("gemm", "kvcache", "fmha", "moe", "comm")),
        )
        models.resolve_context_fmha_by_data(config, model, view, engine, is_context_role=True)
        models.resolve_dsv4_moe_arch(config, model, system_name=system, backend_name=engine)
        models.resolve_nvfp4_for_system(config, system, model, backend_name=engine)
        built = models.get_model(model, config, engine)
        spec = importlib.import_module(sdk + "engine").build_engine_spec_json(
            built,
            model_path=model,
            system=system,
            backend=engine,
            backend_version=self.version,
            kv_block_size=None,
            systems_path=None,
            nextn=0,
            database=view,
        )
        self._engine = core.AicEngine.from_spec(bytes(core.engine_spec_bincode_from_json(spec)), None)
        self._origin = f"measured kernels of {engine} {self.version}: {model} on {system}, tp {parallel.tp}"
        self._chunk_rest, self._chunk_attention = _split(built.context_ops)
        self._row_rest, self._row_attention = _split(built.generation_ops)

    def decode(self, tokens: int) -> float:
        """Milliseconds of a decode step without attention."""
        return _sum(self._engine.evaluate_generation_ops(self._row_rest, tokens, 1024))

    def rows(self, rows: int, context: int) -> float:
        """Milliseconds of the attention of `rows` decodes."""
        return _sum(self._engine.evaluate_generation_ops(self._row_attention, rows, max(context, 1)))

    def mixed(self, tokens: int) -> float:
        """Milliseconds of a step with chunks without attention."""
        return _sum(self._engine.evaluate_context_ops(self._chunk_rest, 1, tokens, 0))

    def chunk(self, tokens: int, prefix: int) -> float:
        """Milliseconds of the attention of one chunk."""
        return _sum(self._engine.evaluate_context_ops(self._chunk_attention, 1, tokens, prefix))

    def table(self, host_ms: float) -> StepTable:
        """All of them as tables, with the error of looking up what lies between their points."""
        table = StepTable(
            decode=Column(TOKENS, tuple(map(self.decode, TOKENS))),
            mixed=Column(MIXED, tuple(map(self.mixed, MIXED))),
            rows=_grid(ROWS, CONTEXTS, self.rows),
            chunk=_grid(CHUNKS, PREFIXES, self.chunk),
            chunk_floor_ms=self.chunk(CHUNKS[0], 0),
            origin=self._origin,
        )
        return replace(table, error=self._error(table), host_ms=host_ms)

    def _error(self, table: StepTable) -> float:
        """The median relative error of steps drawn at random, half of them with a chunk."""
        rng, errors = np.random.default_rng(0), []
        cost = TableCost(terms=LinearTerms(1.0, 0.0, 0.0, 0.0, 0.0, 0.0), table=table)
        for number in range(CHECKED_STEPS):
            rows, context, tokens, prefix = (
                int(2 ** rng.uniform(*ends)) for ends in ((0, 9), (4, 14), (4, 13), (0, 14))
            )
            work = StepWork(rows, rows, rows, rows * context)
            if number % 2:
                work.add_chunk(prefix, tokens)
                exact = self.mixed(rows + tokens) + self.chunk(tokens, prefix) + self.rows(rows, context)
            else:
                exact = self.decode(rows) + self.rows(rows, context)
            errors.append(abs(cost.step(work) * 1e3 / exact - 1.0))
        return float(np.median(errors))


def _resolved(database: Any, system: str, engine: str, version: str) -> str:
    """The version of the package's tables. Raises ConfigError, which lists them, for one that it lacks."""
    if version in SLOTS:
        return str(database.resolve_query_version(system, engine, version))
    known = {}
    for slot in SLOTS:
        try:
            known[slot] = str(database.resolve_query_version(system, engine, slot))
        except Exception:  # this system has no such slot
            continue
    if version not in known.values():
        names = ", ".join(f"{slot} ({found})" for slot, found in known.items())
        raise ConfigError(f"measured kernels have no {engine} {version} on {system}; they have {names or 'none'}")
    return version


def _split(operations: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Indices of the operations that are not attention, and of those that are."""
    attention = [i for i, one in enumerate(operations) if any(word in one._name for word in ATTENTION)]
    return [i for i in range(len(operations)) if i not in attention], attention


def _sum(rows: Sequence[Sequence[Any]]) -> float:
    return float(sum(row[1] for row in rows))


def _grid(first: tuple[int, ...], second: tuple[int, ...], of: Callable[[int, int], float]) -> Grid:
    return Grid(first, second, tuple(tuple(of(a, b) for b in second) for a in first))
