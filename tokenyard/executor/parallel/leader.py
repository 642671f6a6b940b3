"""Rank 0 of a model over several ranks: it starts the others, sends them each plan, and samples.

A plan goes to the other ranks as bytes (`base.plan_bytes`) through a ring in shared memory, and all compute along. What
a token was sampled from never leaves rank 0: tokens that only its device knows reach the others as the inputs of the
next step, so that ranks cannot disagree about them.
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
from pathlib import Path
from typing import Any

import torch

from tokenyard.base import ConfigError, DeviceLostError, EngineDeadError, ExecutorInfo, Int32Array, KvPieces, StepPlan
from tokenyard.executor.forward_batch import ForwardBatch
from tokenyard.executor.parallel.group import Meeting, TorchGroup
from tokenyard.executor.parallel.handshake import OWN_FIELDS, Agreed, Report, Setup, check_report
from tokenyard.executor.parallel.life import BEAT_EVERY_S, Watch
from tokenyard.executor.parallel.links import Beat, Ended, Message, Plan, Welcome
from tokenyard.executor.parallel.members import END_TIMEOUT_S, Members
from tokenyard.executor.parallel.nodes import NodeTerms, RemoteNode, meet_nodes
from tokenyard.executor.parallel.part import Form, name_of, stage_of
from tokenyard.executor.parallel.shared_kv import MappedKv, joined_pieces
from tokenyard.executor.parallel.steps import Range, encode_step
from tokenyard.executor.runner import ModelExecutor, Ticket
from tokenyard.executor.sampling.logprobs import prompt_ranges

logger = logging.getLogger(__name__)

REASON_TIMEOUT_S = 2.0


class Ranks:
    """The other ranks of a model, as rank 0 sees them: beside it, and on other nodes.

    When one of them ends or stands still, all are ended, and `on_lost` is told why; what is computed then raises
    DeviceLostError.
    """

    def __init__(
        self,
        model_path: str,
        size: int,
        options: dict[str, Any],
        form: Form = "tensor",
        terms: NodeTerms | None = None,
        *,
        share_kv: bool = False,
    ) -> None:
        """Start the processes beside this one, and wait for the other nodes. options: those of `load_executor`, JSON
        values only. form: how the model is divided. terms: how nodes find each other, None for this machine alone.
        share_kv: whether this process maps the KV of all.
        """
        self.size, self.form = size, form
        self.own_name = name_of(form, 0, size)
        self.kv: list[MappedKv] | None = [] if share_kv else None
        self.on_lost: Callable[[str], None] = lambda reason: None
        self.group = TorchGroup(self._connection_failed)
        self._folder = tempfile.TemporaryDirectory(prefix="tokenyard-tp-")
        self._reason = ""
        self._lost = threading.Event()
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ranks of the model", daemon=True)
        self._meeting = Meeting(file=str(Path(self._folder.name) / "meeting"))
        self._store: socket.socket | None = None
        self._nodes: list[RemoteNode] = []
        self._terms = terms
        if terms is not None:
            self._meet(terms, options)
            options = options | {"nodes": terms.count}
        here = size if terms is None else len(terms.ranks_of(0, size))
        setups = [
            Setup(model_path, options, rank, size, os.getpid(), self._meeting, rank, here, form, share_kv)
            for rank in range(1, here)
        ]
        self._members = Members(setups, self._check)
        for node in self._nodes:
            node.on_ended = self._node_ended
            if node.reason:
                self._node_ended(node.reason)

    def agree(self, info: ExecutorInfo) -> ExecutorInfo:
        """Wait until all have loaded; returns `info` with the number of pages that every rank has room for.

        Raises ConfigError or EngineDeadError for a rank that failed, is late, or has other settings.
        """
        pages = [check_report(member.name, member.hear(), info) for member in self._members]
        for node, name in self._remote():
            pages.append(check_report(name, node.hear(name), info, (*OWN_FIELDS, "model")))
        agreed = Agreed(min(info.num_pages, *pages))
        for member in self._members:
            member.wire.send(agreed)
        for node in self._nodes:
            self._say(node, agreed)
        return replace(info, num_pages=agreed.num_pages)

    def connect(self, device: torch.device) -> None:
        """Connect all ranks once they have memory for KV, and watch over them. Raises as `agree`."""
        for member in self._members:
            report = self._ready(member.name, member.hear())
            if self.kv is not None and report.kv is not None:
                self.kv.append(MappedKv(member.kv, report.kv))
                os.close(member.kv)
        for node, name in self._remote():
            self._ready(name, node.hear(name))
        self._watcher.start()
        self.group.connect(self._meeting, 0, self.size, device, self._store)
        # Nobody needs the meeting place any more, and this process may be killed.
        self._folder.cleanup()

    def send(self, plan: StepPlan, ranges: Sequence[Range] = ()) -> None:
        """Have the other ranks compute a plan. ranges: see `steps`. Raises DeviceLostError."""
        self._check()
        self._members.begin_step(plan.step)
        data = encode_step(plan, ranges)
        for node in self._nodes:
            self._say(node, Plan(data))
        try:
            self._members.send(data)
        except OSError as error:
            raise self._connection_failed(error) from error

    def give_up(self, reason: str) -> DeviceLostError:
        """End all ranks; returns the error to raise. The first reason counts."""
        if not self._reason:
            self._reason = reason
            self._members.kill()
            for node in self._nodes:
                node.link.leave(Ended(reason))
            # Before anybody who waits for the reason can end this process.
            logger.critical("%s, so all %d ranks of the model end", reason, self.size)
            self._lost.set()
        return DeviceLostError(self._reason)

    def tell_loss(self, tell: Callable[[str], None]) -> None:
        """Call `tell`, from another thread, with the reason when a rank is lost; at once if one is already."""
        self.on_lost = tell
        if self._lost.is_set():
            tell(self._reason)

    def describe(self) -> list[dict[str, Any]]:
        """What people should know of each rank, rank 0 first."""
        found = self._members.describe()
        for node in self._nodes:
            found += [sign | {"node": node.number} for sign in node.signs]
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
            node.close(Ended(why, isinstance(error, ConfigError)))
        self.group.close()
        self._members.close(END_TIMEOUT_S if self._watcher.ident and not self._reason else 0.0)
        if self._store is not None:
            self._store.close()
        self._folder.cleanup()

    def _meet(self, terms: NodeTerms, options: dict[str, Any]) -> None:
        """Wait for the other nodes, and have them load."""
        self._nodes = meet_nodes(terms, terms.facts(options, self.form, self.size))
        address = self._nodes[0].link.own_address
        self._store = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        port = self._store.getsockname()[1]
        self._meeting = Meeting(host=address, port=port, address=address)
        for node in self._nodes:
            with suppress(OSError):
                node.link.send(Welcome(port))
        logger.info("all %d nodes are there", terms.count)

    def _remote(self) -> Iterator[tuple[RemoteNode, str]]:
        """For each rank of the other nodes its node, and what people call it."""
        for node in self._nodes:
            assert self._terms is not None
            for rank in self._terms.ranks_of(node.number, self.size):
                yield node, f"{name_of(self.form, rank, self.size)} on node {node.number}"

    def _ready(self, name: str, report: Report) -> Report:
        if report.failure:
            raise (ConfigError if report.wrong_settings else EngineDeadError)(f"{name}: {report.failure}")
        return report

    def _say(self, node: RemoteNode, message: Message) -> None:
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
        """Look after the others, and give signs of life to them."""
        watch = Watch()
        while not self._closing.wait(BEAT_EVERY_S):
            if reason := self._members.look(watch):
                self.give_up(reason)
            for node in self._nodes:
                if watch.silent_too_long(node.heard_ns):
                    self.give_up(f"nothing is heard of node {node.number}")
                with suppress(OSError):
                    node.link.send(Beat())
            if self._reason:
                self.on_lost(self._reason)
                return


class LeadingExecutor(ModelExecutor):
    """Executor over rank 0's part of a model, with the other ranks."""

    def __init__(self, ranks: Ranks, *parts: Any) -> None:
        super().__init__(*parts)
        self.ranks = ranks

    def pieces(self, pages: Int32Array) -> KvPieces:
        """Say where the KV of pages lies, at all ranks; see Executor. Raises ConfigError where some of it is out of
        reach.
        """
        own, others = super().pieces(pages), self.ranks.kv
        if others is None or len(others) != self.ranks.size - 1 or own.device != "cpu":
            raise ConfigError("KV that is divided among devices or machines cannot be moved or stored yet")
        return joined_pieces(own, others, pages, own_last=self.ranks.form == "pipeline")

    def on_lost(self, tell: Callable[[str], None]) -> None:
        """Call `tell`, from another thread, when a rank is lost; see ParallelExecutor."""
        self.ranks.tell_loss(tell)

    def describe_ranks(self) -> list[dict[str, Any]]:
        """What people should know of each rank; see ParallelExecutor."""
        return self.ranks.describe()

    def close(self) -> None:
        """End the other ranks and give back the device's memory."""
        self.ranks.close()
        super().close()


class TensorParallelExecutor(LeadingExecutor):
    """Executor over rank 0's share of each layer; the other ranks compute along."""

    def _run(self, ticket: Ticket) -> None:
        """Compute a step together. A rank that fails within it is at another place than the others: all end."""
        plan = ticket.plan
        self.ranks.send(plan, [(first, end) for first, end, _ in prompt_ranges(plan, self._sampler.rows)])
        try:
            super()._run(ticket)
        except DeviceLostError:
            raise
        except Exception as error:
            raise self.ranks.give_up(f"{self.ranks.own_name} failed: {type(error).__name__}: {error}") from error

    def _inputs(self, plan: StepPlan, batch: ForwardBatch) -> torch.Tensor:
        tokens = super()._inputs(plan, batch)
        return self.ranks.group.from_first(tokens) if plan.tokens.min() < 0 else tokens
