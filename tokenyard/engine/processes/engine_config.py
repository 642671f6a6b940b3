"""Settings of the engine's processes, as plain data that is sent to them as JSON."""

import os
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from tokenyard.base import ConfigError, ExecutorInfo, SchedulerSettings
from tokenyard.base.kv_store_limits import KvStoreLimits

LIMITS = KvStoreLimits()


def usable_cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@dataclass(slots=True)
class DisaggConfig:
    """PD disaggregation.

    role: "prefill" computes prompts for other engines, "decode" has prompts computed by `prefill_engines`, "both" does
        either, as the cost model predicts, and "null" neither.
    prefill_engines: HTTP addresses of prefill engines.
    backend: KV transport: "tcp", "process_vm" (within a machine), or "auto" for the faster one that works.
    host, port: address to listen on; rank r uses port + r, and 0 picks a free one.
    secret: shared by engines that may exchange KV.
    lease_s: seconds that a prefill engine keeps KV without a heartbeat.
    beat_s: seconds between heartbeats.
    """

    role: str = "null"
    prefill_engines: list[str] = field(default_factory=list)
    backend: str = "auto"
    host: str = "127.0.0.1"
    port: int = 0
    secret: str = ""
    lease_s: float = 30.0
    beat_s: float = 1.0


@dataclass(slots=True)
class KvStoreConfig:
    """The KV store (HiCache).

    enabled: whether there is one.
    backend: store behind host memory: "disk", "valkey" (at `url`), or "none".
    url: address of the Valkey or Redis.
    host_ratio: size of the host memory store of a GPU, as a multiple of its KV pool; None for 2.
    host_gb: the same in 10^9 bytes; 0 for `host_ratio`.
    folder: folder of the slabs; rank r > 0 uses `rank-r` in it.
    max_gb: limit of the slabs, in 10^9 bytes.
    min_free_gb: space that the disk keeps free, in 10^9 bytes.
    write_mb_s: limit of writes to a disk in 10^6 bytes per second, 0 for none.
    prefetch_policy, timeout_s, timeout_per_1k_tokens_s: how long a request waits for stored KV; see `KvStoreLimits`.
    """

    enabled: bool = False
    backend: str = "none"
    url: str = ""
    host_ratio: float | None = None
    host_gb: float = 0.0
    folder: str = ""
    max_gb: float = 10.0
    min_free_gb: float = 1.0
    write_mb_s: float = LIMITS.write_mb_s
    prefetch_policy: str = LIMITS.prefetch_policy
    timeout_s: float = LIMITS.timeout_s
    timeout_per_1k_tokens_s: float = LIMITS.timeout_per_1k_tokens_s

    @property
    def limits(self) -> KvStoreLimits:
        """How long requests wait, and how fast KV is written: without a limit except to a disk."""
        write_mb_s = self.write_mb_s if self.backend == "disk" else 0.0
        return KvStoreLimits(write_mb_s, self.prefetch_policy, self.timeout_s, self.timeout_per_1k_tokens_s)

    def disk_tokens(self, kv_bytes_per_token: int) -> int:
        """How many tokens a rank's own disk holds; 0 for none, and where the bytes of a token are not known."""
        on_disk = self.enabled and self.backend == "disk" and kv_bytes_per_token > 0
        return int(self.max_gb * 1e9) // kv_bytes_per_token if on_disk else 0


@dataclass(slots=True)
class NodesConfig:
    """A model over several machines.

    count: number of machines (SGLang's `nnodes`).
    number: index of this machine (SGLang's `node_rank`).
    host, port: where node 0 waits for the others.
    secret: shared by all machines.
    timeout_s: how long they wait for each other, in seconds.
    """

    count: int = 1
    number: int = 0
    host: str = ""
    port: int = 0
    secret: str = ""
    timeout_s: float = 300.0


@dataclass(slots=True)
class EngineConfig:
    """Settings of one engine.

    Limits are those of all ranks together, see `for_rank`.

    model_path: folder of the model.
    ranks: data-parallel schedulers, each with a model.
    load_balance_method: how requests are distributed to ranks (`routing.balance`).
    tp_size, pp_size: tensor- and pipeline-parallel processes of each rank.
    pp_async_batch_depth: plans in flight in addition to one per stage.
    nodes: the machines that the processes of a parallel model run on.
    enable_dp_attention: whether the ranks share one model's MLPs and compute every step together.
    executor: a name in `EXECUTORS` (`scheduler_loop.py`).
    executor_options: keyword arguments of its `load_executor`, JSON values only.
    scheduler: page size, context length and steps in flight are taken from the loaded model and from `overlap`.
    tokenizer_path: a folder with tokenizer.json, or that file; "" for the model's own.
    chat_template: a template file used instead of the model's own, "" for that.
    cost_profile: prior cost model, as "device/model" or a file; "" for the default of the device.
    kv_events_endpoint: where events of the prefix cache are published, if `scheduler.enable_kv_events`.
    kv_events_topic: the topic of these events.
    kv_events_replay_endpoint: where past events can be requested again; "" for nowhere.
    record: file for a tape (`tape/codec.py`); "" for none.
    record_plain: whether the tape keeps ids and names unchanged.
    priority_function: "module:name" of a function that adds levels of urgency, "" for none.
    disagg: PD disaggregation.
    kv_store: the KV store.
    adapters: folders of LoRA adapters that are loaded at the start, by name.
    max_loaded_loras: most adapters that may be loaded.
    watchdog_timeout_s: longest time that a step, or the loop's own work between two, may take; 0 for any.
    """

    model_path: str
    ranks: int = 1
    load_balance_method: str = "predicted_ttft"
    tp_size: int = 1
    pp_size: int = 1
    pp_async_batch_depth: int = 0
    nodes: NodesConfig = field(default_factory=NodesConfig)
    enable_dp_attention: bool = False
    executor: str = "torch"
    executor_options: dict[str, Any] = field(default_factory=dict)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    overlap: bool = True
    tokenizer_path: str = ""
    skip_tokenizer_init: bool = False
    chat_template: str = ""
    cost_profile: str = ""
    kv_events_endpoint: str = ""
    kv_events_topic: str = ""
    kv_events_replay_endpoint: str = ""
    record: str = ""
    record_plain: bool = False
    priority_function: str = ""
    disagg: DisaggConfig = field(default_factory=DisaggConfig)
    kv_store: KvStoreConfig = field(default_factory=KvStoreConfig)
    adapters: dict[str, str] = field(default_factory=dict)
    max_loaded_loras: int | None = None
    watchdog_timeout_s: float = 300.0
    decode_log_interval: int = 40
    log_level: str = "info"
    log_format: str = "text"

    def for_rank(self, rank: int) -> "EngineConfig":
        """The settings of one rank: its part of the requests, of the KV tokens and of the CPU's threads.

        Every rank has its own tape and its own port for KV events, which follow from its number where they are opened.
        """
        if self.ranks == 1:
            return self
        # The import of policies costs the processes that have none.
        from tokenyard.policy.tenant_limits import rank_share

        scheduler = self.scheduler
        running, queued = (
            rank_share(limit, rank, self.ranks)
            for limit in (scheduler.max_running_requests, scheduler.max_queued_requests)
        )
        scheduler = replace(
            scheduler,
            max_running_requests=running,
            max_queued_requests=queued,
            dp_size=self.ranks,
        )
        options = dict(self.executor_options)
        if options.get("max_pool_rows") is not None:
            options["max_pool_rows"] = rank_share(options["max_pool_rows"], rank, self.ranks)
        if options.get("max_total_tokens") is not None:
            options["max_total_tokens"] //= self.ranks
        if self.executor == "torch":
            cores = options.get("threads") or usable_cores()
            options |= {"threads": max(1, cores // self.ranks), "rank": rank, "ranks": self.ranks}
        return replace(self, scheduler=scheduler, executor_options=options)

    def plans_in_flight(self, info: ExecutorInfo) -> int:
        """How many plans may be made before the first is done: with stages one for each, and some more if asked for.

        Else a step is planned while the one before runs, but on a CPU a launch returns when its step is done.
        """
        if not self.overlap:
            return 1
        if self.pp_size > 1:
            return self.pp_size + self.pp_async_batch_depth
        return 1 if info.device == "cpu" else 2

    def scheduler_settings(self, info: ExecutorInfo) -> SchedulerSettings:
        """Return the scheduler's settings for a loaded model."""
        return replace(
            self.scheduler,
            page_size=info.page_size,
            context_length=info.context_length,
            max_in_flight=self.plans_in_flight(info),
        )


class ChildTask(msgspec.Struct):
    """What a child process reads from its standard input as one line of JSON.

    rank, source: of a scheduler: its data-parallel rank, and a number that no other process of this engine has had.
    policy_note: a remark on its policy for users.
    """

    config: EngineConfig
    parent_pid: int
    socket_directory: str
    rank: int = 0
    source: int = 0
    policy_note: str = ""


class ChildReport(msgspec.Struct):
    """What a child process answers, as lines of JSON: that it is ready, or why it cannot be or go on.

    failure: why it cannot start or go on; "" if it is ready.
    wrong_settings: whether settings or files cause the failure, which its text names.
    culprit: the user code that does not return; "" for none.
    info: what a scheduler reports about its model.
    """

    failure: str = ""
    wrong_settings: bool = False
    culprit: str = ""
    info: ExecutorInfo | None = None


def encode_line(message: ChildTask | ChildReport) -> bytes:
    """Return a message as one line of JSON."""
    return msgspec.json.encode(message) + b"\n"


def decode_task(line: bytes) -> ChildTask:
    """Return the task in a line. Raises ConfigError for anything else."""
    try:
        return msgspec.json.decode(line, type=ChildTask)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"the engine's settings do not decode: {error}") from error


def decode_report(line: bytes) -> ChildReport:
    """Return the report in a line; an empty line means that the child ended without one."""
    try:
        return msgspec.json.decode(line, type=ChildReport)
    except msgspec.MsgspecError:
        return ChildReport(failure="it ended without a report; see its log")
