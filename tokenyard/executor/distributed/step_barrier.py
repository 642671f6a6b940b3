"""Synchronizes the steps of data-parallel ranks: when one rank has tokens, all compute a step together.

A *round* is one step of all ranks. A rank that has a step asks for a round; the hub, a thread of rank 0, then calls all
others, and each answers with the number of tokens of its step, or 0. When all have answered, the hub sends all
counts to all ranks, and they compute. A rank without a step computes an idle batch in the thread that listens to the
hub. No rank polls a clock, and ranks sleep while none has a step.
"""

import logging
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

from tokenyard.base import DeviceLostError

logger = logging.getLogger(__name__)

CALL, GO, LOST = b"c", b"g", b"l"
LEAVES = -1
"""A rank sends this in place of its tokens when it ends on request."""

MAX_STEP_MESSAGE_BYTES = 1 << 16
_COUNT = struct.Struct("=q")
FREE, ASKED, OWN = "free", "asked", "own"
"""What a rank does: nothing, it has asked for a round and waits, it computes its own step."""


class StepBarrier:
    """Opens rounds. ends: a packet socket to each rank, by rank; names: the names of the ranks in messages."""

    def __init__(self, ends: list[socket.socket], names: list[str]) -> None:
        self._ends, self._names = ends, names
        self.reason = ""
        threading.Thread(target=self._run, name="rounds of ranks", daemon=True).start()

    def _run(self) -> None:
        with selectors.DefaultSelector() as ready:
            for rank, end in enumerate(self._ends):
                ready.register(end, selectors.EVENT_READ, rank)
            counts: dict[int, int] = {}
            while True:
                for key, _ in ready.select():
                    data = _receive(self._ends[key.data])
                    tokens = _COUNT.unpack(data)[0] if data else LEAVES
                    if tokens == LEAVES:
                        self._end(key.data, asked=bool(data))
                        return
                    first = not counts
                    counts[key.data] = tokens
                    if first:
                        self._tell(CALL, but=key.data)
                    if len(counts) == len(self._ends):
                        self._tell(GO + struct.pack(f"={len(counts)}q", *(counts[rank] for rank in sorted(counts))))
                        counts = {}

    def _tell(self, data: bytes, but: int = -1) -> None:
        for rank, end in enumerate(self._ends):
            if rank != but:
                # A rank that has ended is detected when its socket reports the end.
                with suppress(OSError):
                    end.send(data)

    def _end(self, rank: int, *, asked: bool) -> None:
        reason = self.reason or f"{self._names[rank]} has {'left' if asked else 'gone'}"
        level = logging.INFO if asked else logging.CRITICAL
        logger.log(level, "%s, so all %d ranks of the model end", reason, len(self._ends))
        self._tell(LOST + reason.encode())
        for end in self._ends:
            end.close()


class Participant:
    """One rank.

    end: the packet socket to the hub.
    idle: computes an idle batch; an exception ends the group.
    begin_step: gets the number of tokens of each rank before a step.
    own_name, rank0_name: names in messages.
    """

    def __init__(
        self,
        end: socket.socket,
        idle: Callable[[], None],
        begin_step: Callable[[list[int]], None],
        own_name: str,
        rank0_name: str,
    ) -> None:
        self._end, self._idle, self._begin_step = end, idle, begin_step
        self._own_name, self._rank0_name = own_name, rank0_name
        self._state = FREE
        self._changed = threading.Condition()
        self._reason = ""
        self._tell_loss: Callable[[str], None] = lambda reason: None
        self.rounds = self.idle_steps = 0
        self._closing = False
        threading.Thread(target=self._listen, name="rounds of this rank", daemon=True).start()

    def on_lost(self, tell: Callable[[str], None]) -> None:
        """Call `tell`, from another thread, with the reason when a rank is lost; immediately if one already is."""
        with self._changed:
            self._tell_loss = tell
            lost = bool(self._reason)
        if lost:
            tell(self._reason)

    def begin(self, tokens: int) -> None:
        """Wait for a round for this rank's step of `tokens` tokens; call `end` afterwards. Raises DeviceLostError."""
        with self._changed:
            self._wait_for(FREE)
            self._state = ASKED
            self._say(tokens)
            self._wait_for(OWN)

    def end(self) -> None:
        """Mark the step as computed or failed."""
        with self._changed:
            self._state = FREE
            self._changed.notify_all()

    def lost(self, error: Exception) -> DeviceLostError:
        """Return the error to raise where a rank cannot be reached."""
        with self._changed:
            return DeviceLostError(self._reason or f"the ranks of the model lost each other: {error}")

    def close(self) -> None:
        """Disconnect from the others, which then end."""
        self._closing = True
        self._say(LEAVES)
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _wait_for(self, state: str) -> None:
        self._changed.wait_for(lambda: self._state == state or bool(self._reason))
        if self._reason:
            raise DeviceLostError(self._reason)

    def _say(self, tokens: int) -> None:
        with suppress(OSError):
            self._end.send(_COUNT.pack(tokens))

    def _listen(self) -> None:
        while (data := _receive(self._end)) and data[:1] != LOST:
            if data[:1] == CALL:
                self._join()
            elif not self._go([count for (count,) in _COUNT.iter_unpack(data[1:])]):
                return
        if self._closing:
            return
        self._lose(data[1:].decode() or f"{self._rank0_name} has gone")

    def _join(self) -> None:
        """Answer a call with 0 tokens, unless this rank has asked for a round meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._state != OWN)
            if self._state == FREE:
                # This rank's next step may not begin before this round ends.
                self._state = "idle"
                self._say(0)

    def _go(self, counts: list[int]) -> bool:
        """Begin a step; False if an idle batch failed, which ends the group."""
        self._begin_step(counts)
        self.rounds += 1
        with self._changed:
            if self._state == ASKED:
                self._state = OWN
                self._changed.notify_all()
                return True
        self.idle_steps += 1
        try:
            self._idle()
        except DeviceLostError:
            logger.debug("a round was cut off")
        except Exception as error:
            # The others are past this point of the step, so this rank cannot rejoin them.
            logger.exception("an idle batch failed")
            self._lose(f"{self._own_name} failed in an idle batch: {type(error).__name__}: {error}")
            self._end.close()
            return False
        self.end()
        return True

    def _lose(self, reason: str) -> None:
        """Report a loss to whoever waits for a round, and to `on_lost`."""
        with self._changed:
            self._reason = reason
            self._changed.notify_all()
        self._tell_loss(reason)


def _receive(end: socket.socket) -> bytes:
    try:
        return end.recv(MAX_STEP_MESSAGE_BYTES)
    except OSError:
        return b""
