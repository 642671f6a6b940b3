"""Rank 0 of a model over several ranks: it starts the others, sends them each plan, and samples.

A plan goes to the other ranks as bytes (`base.plan_bytes`) through a ring in shared memory, and all ranks compute it.
Only rank 0 samples: tokens that only its device knows reach the others as the inputs of the next step, so that ranks
cannot disagree about them.
"""

import logging
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tokenyard.base import (
    ConfigError,
    DeviceLostError,
    EngineDeadError,
    ExecutorInfo,
    Int32Array,
    KvPieces,
    StepPlan,
    WeightGroup,
    WeightSource,
)
from tokenyard.executor.distributed.child_ranks import END_TIMEOUT_S, ChildRanks
from tokenyard.executor.distributed.node_connection import Message, NodeEnded, NodeHeartbeat, NodePlan, NodeWelcome
from tokenyard.executor.distributed.partition import ParallelKind, Range, name_of, stage_of
from tokenyard.executor.distributed.process_group import Rendezvous, TorchProcessGroup
from tokenyard.executor.distributed.process_watch import HEARTBEAT_INTERVAL_S, ProcessWatch
from tokenyard.executor.distributed.rank_messages import (
    DROP_WEIGHTS,
    OWN_FIELDS,
    RELEASE_KV,
    RELEASE_WEIGHTS,
    SWAP_WEIGHTS,
    AgreedNumPages,
    RankCall,
    RankReport,
    RankSetup,
    check_report,
    encode_step,
)
from tokenyard.executor.distributed.remote_nodes import MultiNodeConfig, RemoteNode, wait_for_nodes
from tokenyard.executor.distributed.shared_kv import MappedKv, pieces_of_all_ranks
from tokenyard.executor.forward_batch import ForwardBatch
from tokenyard.executor.runner import ModelExecutor, Ticket
from tokenyard.executor.sampling.logprobs import prompt_ranges

logger = logging.getLogger(__name__)

REASON_TIMEOUT_S = 2.0


class ModelRanks:
    """The other ranks of a model, as rank 0 sees them: on its node and on other nodes.

    When one of them ends or is stalled, all are ended, and `on_lost` is told why; what is computed then raises
    DeviceLostError.
    """

    def __init__(
        self,
        model_path: str,
        size: int,
        options: dict[str, Any],
        form: ParallelKind = "tensor",
        terms: MultiNodeConfig | None = None,
        *,
        share_kv: bool = False,
    ) -> None:
        """Start the ranks of this node, and wait for the other nodes.

        options: those of `load_executor`, JSON values only.
        form: how the model is divided.
        terms: how nodes find each other, None for this machine alone.
        share_kv: whether this process maps the KV of all ranks.
        """
        self.size, self.form = size, form
        self.own_name = name_of(form, 0, size)
        self.kv: list[MappedKv] | None = [] if share_kv else None
        self.on_lost: Callable[[str], None] = lambda reason: None
        self.group = TorchProcessGroup(
            self._connection_failed,
            pipeline=form != "tensor",
            symmetric=form == "tensor" and options.get("enable_torch_symm_mem", False),
        )
        self._folder = tempfile.TemporaryDirectory(prefix="tokenyard-tp-")
        self._reason = ""
        self._calling = threading.Lock()
        self._lost = threading.Event()
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ranks of the model", daemon=True)
        self._meeting = Rendezvous(file=str(Path(self._folder.name) / "meeting"))
        self._store: socket.socket | None = None
        self._nodes: list[RemoteNode] = []
        self._terms = terms
        if terms is not None:
            self._connect_nodes(terms, options)
            options = options | {"nodes": terms.count}
        here = size if terms is None else len(terms.ranks_of(0, size))
        setups = [
            RankSetup(model_path, options, rank, size, os.getpid(), self._meeting, rank, here, form, share_kv)
            for rank in range(1, here)
        ]
        self._children = ChildRanks(setups, self._check)
        for node in self._nodes:
            node.on_ended = self._node_ended
            if node.reason:
                self._node_ended(node.reason)

    def agree(self, info: ExecutorInfo) -> ExecutorInfo:
        """Wait until all have loaded; returns `info` with the number of pages that every rank has room for.

        Raises ConfigError or EngineDeadError for a rank that failed, is late, or has other settings.
        """
        pages = [check_report(child.name, child.wait_report(), info) for child in self._children]
        for node, name in self._remote():
            pages.append(check_report(name, node.wait_report(name), info, (*OWN_FIELDS, "model")))
        agreed = AgreedNumPages(min(info.num_pages, *pages))
        for child in self._children:
            child.wire.send(agreed)
        for node in self._nodes:
            self._send(node, agreed)
        return replace(info, num_pages=agreed.num_pages)

    def connect(self, device: torch.device) -> None:
        """Connect all ranks once they have memory for KV, and start the watch thread. Raises as `agree`."""
        for child in self._children:
            report = self._ready(child.name, child.wait_report())
            if self.kv is not None and report.kv is not None:
                self.kv.append(MappedKv(child.kv, report.kv))
                os.close(child.kv)
        for node, name in self._remote():
            self._ready(name, node.wait_report(name))
        self._watcher.start()
        self.group.connect(self._meeting, 0, self.size, device, self._store)
        # All ranks are connected, so the folder is not needed; remove it before this process can be killed.
        self._folder.cleanup()

    def send(self, plan: StepPlan, ranges: Sequence[Range] = ()) -> None:
        """Send a plan to the other ranks. ranges: see `encode_step`. Raises DeviceLostError."""
        self._check()
        self._children.begin_step(plan.step)
        self._send_frame(encode_step(plan, ranges))

    def order(self, order: bytes) -> None:
        """Have the other ranks follow an order behind the plans that were sent before. Raises DeviceLostError."""
        self._check()
        self._send_frame(order)

    def _send_frame(self, frame: bytes) -> None:
        for node in self._nodes:
            self._send(node, NodePlan(frame))
        try:
            self._children.send(frame)
        except OSError as error:
            raise self._connection_failed(error) from error

    def check_one_machine(self) -> None:
        """Raise ConfigError for a model over several machines, whose weights stay as they are."""
        if self._nodes:
            raise ConfigError(
                "the weights of a model over several machines (--nnodes) cannot be changed or released yet; restart the"
                " engine with the new checkpoint"
            )

    def together(self, call: RankCall, own: Callable[[], Any]) -> list[Any]:
        """Have the other ranks do `call` while this thread does `own`; returns what each returned, rank 0 first.

        Raises what `own` raises, and ConfigError, which names the rank, where another one failed. All have ended then.
        """
        self.check_one_machine()
        with self._calling:
            self._children.call(call)
            try:
                first = own()
            finally:
                replies = [(child.name, child.reply()) for child in self._children]
        for name, reply in replies:
            if reply.failure:
                raise ConfigError(f"{name}: {reply.failure}")
        return [first, *(reply.value for _, reply in replies)]

    def give_up(self, reason: str) -> DeviceLostError:
        """End all ranks; returns the error to raise, which has the first reason given."""
        if not self._reason:
            self._reason = reason
            self._children.kill()
            for node in self._nodes:
                node.link.leave(NodeEnded(reason))
            # Log before setting the event: a thread that waits for the reason may end this process.
            logger.critical("%s, so all %d ranks of the model end", reason, self.size)
            self._lost.set()
        return DeviceLostError(self._reason)

    def notify_loss(self, tell: Callable[[str], None]) -> None:
        """Call `tell`, from another thread, with the reason when a rank is lost; immediately if one already is."""
        self.on_lost = tell
        if self._lost.is_set():
            tell(self._reason)

    def describe(self) -> list[dict[str, Any]]:
        """Return the state of each rank, rank 0 first."""
        found = self._children.describe()
        for node in self._nodes:
            found += [sign | {"node": node.number} for sign in node.statuses]
        places = [
            {"tp_rank": rank} if self.form == "tensor" else {"pp_rank": stage_of(rank, self.size)}
            for rank in range(self.size)
        ]
        return [place | sign for place, sign in zip(places, found, strict=False)]

    def close(self) -> None:
        """End all ranks; closing again does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._watcher.is_alive() and self._watcher is not threading.current_thread():
            self._watcher.join()
        error = sys.exception()
        why = self._reason or ("" if error is None else str(error) or type(error).__name__)
        for node in self._nodes:
            node.close(NodeEnded(why, isinstance(error, ConfigError)))
        self.group.close()
        self._children.close(END_TIMEOUT_S if self._watcher.ident and not self._reason else 0.0)
        if self._store is not None:
            self._store.close()
        self._folder.cleanup()

    def _connect_nodes(self, terms: MultiNodeConfig, options: dict[str, Any]) -> None:
        """Wait for the other nodes, and start their loading."""
        self._nodes = wait_for_nodes(terms, terms.facts(options, self.form, self.size))
        address = self._nodes[0].link.own_address
        self._store = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        port = self._store.getsockname()[1]
        self._meeting = Rendezvous(host=address, port=port, address=address)
        for node in self._nodes:
            with suppress(OSError):
                node.link.send(NodeWelcome(port))
        logger.info("all %d nodes are there", terms.count)

    def _remote(self) -> Iterator[tuple[RemoteNode, str]]:
        """Yield the node and the name of each rank of the other nodes."""
        for node in self._nodes:
            assert self._terms is not None
            for rank in self._terms.ranks_of(node.number, self.size):
                yield node, f"{name_of(self.form, rank, self.size)} on node {node.number}"

    def _ready(self, name: str, report: RankReport) -> RankReport:
        if report.failure:
            raise (ConfigError if report.wrong_settings else EngineDeadError)(f"{name}: {report.failure}")
        return report

    def _send(self, node: RemoteNode, message: Message) -> None:
        try:
            node.link.send(message)
        except OSError as error:
            raise self._connection_failed(error) from error

    def _node_ended(self, reason: str) -> None:
        if not self._closing.is_set():
            self.give_up(reason)

    def _check(self) -> None:
        if self._reason:
            raise DeviceLostError(self._reason)

    def _connection_failed(self, error: Exception) -> DeviceLostError:
        """The reason why the others cannot be reached, which the watcher finds soon."""
        self._lost.wait(REASON_TIMEOUT_S)
        return self.give_up(f"the ranks of the model lost each other: {error}")

    def _watch(self) -> None:
        """Check the other ranks and send them heartbeats."""
        watch = ProcessWatch()
        while not self._closing.wait(HEARTBEAT_INTERVAL_S):
            if reason := self._children.check(watch):
                self.give_up(reason)
            for node in self._nodes:
                if watch.is_silent(node.heard_ns):
                    self.give_up(f"nothing is heard of node {node.number}")
                with suppress(OSError):
                    node.link.send(NodeHeartbeat())
            if self._reason:
                self.on_lost(self._reason)
                return


class Rank0Executor(ModelExecutor):
    """Executor over rank 0's part of a model, with the other ranks."""

    def __init__(self, ranks: ModelRanks, *parts: Any) -> None:
        super().__init__(*parts)
        self.ranks = ranks

    def pieces(self, pages: Int32Array) -> KvPieces:
        """Return where the KV of pages lies, at all ranks; see Executor.

        Raises ConfigError where some of it is not mapped here.
        """
        own, others = super().pieces(pages), self.ranks.kv
        if others is None or len(others) != self.ranks.size - 1 or own.device != "cpu":
            raise ConfigError("KV that is divided among devices or machines cannot be moved or stored yet")
        return pieces_of_all_ranks(own, others, pages, own_last=self.ranks.form == "pipeline")

    def prepare_weights(self, source: WeightSource) -> str:
        """Read other weights at all ranks, each its part; see Executor."""
        digests = self.ranks.together(RankCall(source=source), partial(super().prepare_weights, source))
        if len(set(digests)) > 1:
            raise ConfigError("the ranks of the model read different weights; the files changed meanwhile")
        return str(digests[0])

    def swap_weights(self) -> None:
        """Use the weights that were prepared, at all ranks from the same step on; see Executor."""
        super().swap_weights()
        self.ranks.order(SWAP_WEIGHTS)

    def drop_weights(self) -> None:
        """Free weights that were prepared; see Executor."""
        super().drop_weights()
        self.ranks.order(DROP_WEIGHTS)

    def release_memory(self, *, weights: bool, kv_cache: bool) -> None:
        """Give memory back at all ranks; see Executor."""
        self.ranks.check_one_machine()
        super().release_memory(weights=weights, kv_cache=kv_cache)
        for wanted, order in ((weights, RELEASE_WEIGHTS), (kv_cache, RELEASE_KV)):
            if wanted:
                self.ranks.order(order)

    def join_weight_group(self, group: WeightGroup) -> None:
        """Join a trainer's group with all ranks; see Executor."""
        self.ranks.together(RankCall(group=group), partial(super().join_weight_group, group))

    def receive_weights(self, group: str, tensors: list[tuple[str, str, list[int]]]) -> None:
        """Receive tensors at all ranks; see Executor."""
        call = RankCall(name=group, tensors=tensors)
        self.ranks.together(call, partial(super().receive_weights, group, tensors))

    def leave_weight_group(self, group: str) -> None:
        """Leave a trainer's group with all ranks; see Executor."""
        self.ranks.together(RankCall(name=group), partial(super().leave_weight_group, group))

    def on_lost(self, tell: Callable[[str], None]) -> None:
        """Call `tell`, from another thread, when a rank is lost; see DistributedExecutor."""
        self.ranks.notify_loss(tell)

    def describe_ranks(self) -> list[dict[str, Any]]:
        """Return the state of each rank; see DistributedExecutor."""
        return self.ranks.describe()

    def close(self) -> None:
        """End the other ranks and release the device's memory."""
        self.ranks.close()
        super().close()


class TensorParallelExecutor(Rank0Executor):
    """Executor over rank 0's share of each layer; the other ranks compute theirs in the same step."""

    def _run(self, ticket: Ticket) -> None:
        """Compute a step with all ranks. A rank that fails within it cannot rejoin the others, so all end."""
        plan = ticket.plan
        self.ranks.send(plan, [(first, end) for first, end, _ in prompt_ranges(plan, self.sampler.rows)])
        try:
            super()._run(ticket)
        except DeviceLostError:
            raise
        except Exception as error:
            raise self.ranks.give_up(f"{self.ranks.own_name} failed: {type(error).__name__}: {error}") from error

    def _inputs(self, plan: StepPlan, batch: ForwardBatch) -> torch.Tensor:
        tokens = super()._inputs(plan, batch)
        return self.ranks.group.broadcast_from_rank0(tokens) if plan.tokens.min() < 0 else tokens
