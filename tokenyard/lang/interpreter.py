"""The state of a program: its text so far, and the generations that still run.

Adding to a state returns immediately. One event loop executes the expressions of all programs, in order for each state,
and only reading a value waits for it. So forks run concurrently without a thread each.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from tokenyard.lang.choices import choose
from tokenyard.lang.ir import Expression, Gen, Role, Select, Several, Text, as_expression
from tokenyard.lang.values import BaseBackend, ProgramPrompt

_END = None


class _Loop:
    """The event loop of all programs. It runs in a separate thread that starts with the first program."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, work: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Schedule a coroutine from any thread."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="tokenyard-lang", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)


LOOP = _Loop()


@dataclass(slots=True)
class Transcript:
    """The text of a program so far.

    text: all text of a program without roles.
    messages: the messages of a program with roles.
    role: the current role, "" outside of roles.
    in_roles: whether the program uses roles.
    """

    text: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    role: str = ""
    in_roles: bool = False

    def add(self, text: str) -> None:
        """Append text to the current role, or to the text of a program without roles."""
        if self.in_roles:
            if not self.role:
                raise ValueError("in a program with roles, texts stand within system, user or assistant")
            self.messages[-1]["content"] += text
        else:
            self.text += text

    def begin(self, role: str) -> None:
        """Begin a role."""
        if self.text:
            raise ValueError("roles and text without a role do not go together in one program")
        if self.role:
            raise ValueError(f"{role} begins before {self.role} has ended")
        self.in_roles, self.role = True, role
        self.messages.append({"role": role, "content": ""})

    def end(self, role: str) -> None:
        """End a role."""
        if self.role != role:
            raise ValueError(f"{role} ends, which has not begun")
        self.role = ""

    def prompt(self, *, answer: bool = True) -> ProgramPrompt:
        """The prompt of the next generation; without `answer` one that is only prefilled."""
        if not self.in_roles:
            return ProgramPrompt(text=self.text)
        if not self.role:
            return ProgramPrompt(messages=self._copies(), open=answer)
        if self.role != "assistant":
            if answer:
                raise ValueError(f"only the assistant generates, not {self.role}")
            return ProgramPrompt(messages=self._copies()[:-1], open=False)
        if self.messages[-1]["content"]:
            return ProgramPrompt(messages=self._copies(), continues=True)
        return ProgramPrompt(messages=self._copies()[:-1], open=answer)

    def _copies(self) -> tuple[dict[str, str], ...]:
        return tuple(dict(message) for message in self.messages)

    def copy(self) -> "Transcript":
        """A copy, for a fork."""
        return replace(self, messages=[dict(message) for message in self.messages])


class ProgramState:
    """The state of a program (SGLang's `ProgramState`): `s += ...` adds to it, `s["name"]` reads a value."""

    def __init__(
        self,
        backend: BaseBackend,
        defaults: dict[str, Any],
        said: Transcript | None = None,
        variables: dict[str, Any] | None = None,
        after: "Future[Any] | None" = None,
    ) -> None:
        self._backend = backend
        self._defaults = defaults
        self._said = said or Transcript()
        self._values: dict[str, Future[Any]] = {}
        self._meta: dict[str, Any] = {}
        for name, value in (variables or {}).items():
            self._values[name] = Future()
            self._values[name].set_result(value)
        self._last = after
        self._pieces: list[tuple[str | None, str]] = []
        self._news = threading.Condition()
        self._ended = False
        self.error: BaseException | None = None

    # ---- adding ------------------------------------------------------------------------------------------------

    def __iadd__(self, other: Expression | str) -> "ProgramState":
        self._add(as_expression(other))
        return self

    def _add(self, expression: Expression) -> None:
        """Schedule an expression after those that were added before."""
        for name in _names(expression):
            self._values[name] = Future()
        before, self._last = self._last, None
        self._last = LOOP.run(self._after(before, expression))

    async def _after(self, before: "Future[Any] | None", expression: Expression) -> None:
        try:
            if before is not None:
                await asyncio.wrap_future(before)
            await self._work(expression)
        except BaseException as error:
            self.error = self.error or error
            for name in _names(expression):
                if not self._values[name].done():
                    self._values[name].set_exception(error)
            raise

    async def _work(self, expression: Expression) -> None:
        match expression:
            case Text(text):
                self._said.add(text)
                self._tell(None, text)
            case Several(parts):
                for part in parts:
                    await self._work(part)
            case Role(role, content, begins, ends):
                if begins:
                    self._said.begin(role)
                if content is not None:
                    await self._work(content)
                if ends:
                    self._said.end(role)
            case Gen():
                await self._generate(expression)
            case Select(name, choices, temperature, method):
                prompt = self._said.prompt()
                chosen, meta = await choose(self._backend, prompt, choices, temperature, method)
                self._said.add(chosen)
                self._tell(name, chosen)
                self._set(name, chosen, meta)

    async def _generate(self, wish: Gen) -> None:
        sampling = {**self._defaults, **wish.sampling}
        prompt, texts = self._said.prompt(), [""]
        meta: Any = {}
        if sampling.get("n", 1) > 1:
            texts, meta = await self._generate_several(prompt, sampling)
            self._said.add(texts[0])
            self._set(wish.name, texts, meta)
            return
        async for piece in self._backend.generate(prompt, sampling, logprobs=wish.logprobs):
            texts[0] += piece.text
            meta = piece.meta
            self._tell(wish.name, piece.text)
        self._said.add(texts[0])
        self._set(wish.name, texts[0], meta)

    async def _generate_several(self, prompt: ProgramPrompt, sampling: dict[str, Any]) -> tuple[list[str], Any]:
        """Several answers to one prompt, each with a different seed."""
        count, seed = sampling.pop("n"), sampling.pop("seed", None)

        async def one(place: int) -> tuple[str, dict[str, Any]]:
            own = sampling if seed is None else {**sampling, "seed": seed + place}
            pieces = [piece async for piece in self._backend.generate(prompt, own)]
            return "".join(piece.text for piece in pieces), pieces[-1].meta if pieces else {}

        await self._backend.cache_prefix(prompt)
        found = await asyncio.gather(*(one(place) for place in range(count)))
        return [text for text, _ in found], [meta for _, meta in found]

    def _set(self, name: str | None, value: Any, meta: Any) -> None:
        if name is not None:
            self._meta[name] = meta
            self._values[name].set_result(value)

    def _tell(self, name: str | None, text: str) -> None:
        with self._news:
            self._pieces.append((name, text))
            self._news.notify_all()

    # ---- roles -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _in_role(self, role: str) -> Iterator[None]:
        self._add(Role(role, ends=False))
        yield
        self._add(Role(role, begins=False))

    def system(self, content: Expression | str | None = None) -> Any:
        """Add a system message; without content, returns a context manager for its parts."""
        return self._role("system", content)

    def user(self, content: Expression | str | None = None) -> Any:
        """Add a user message; without content, returns a context manager for its parts."""
        return self._role("user", content)

    def assistant(self, content: Expression | str | None = None) -> Any:
        """Add an assistant message; without content, returns a context manager for its parts."""
        return self._role("assistant", content)

    def _role(self, role: str, content: Expression | str | None) -> Any:
        if content is None:
            return self._in_role(role)
        self._add(Role(role, as_expression(content)))
        return self

    # ---- reading -----------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        """Wait for a value. Raises KeyError for an unknown name, and the error with which its generation failed."""
        return self._values[name].result()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get_var(self, name: str) -> Any:
        """The same as `s[name]`."""
        return self[name]

    def set_var(self, name: str, value: Any) -> None:
        """Set the value of a name."""
        self._values[name] = Future()
        self._values[name].set_result(value)

    def get_meta_info(self, name: str) -> Any:
        """The back end's `meta_info` of a generation: token counts, cached tokens, finish reason."""
        self._values[name].result()
        return self._meta.get(name)

    def sync(self) -> None:
        """Wait until everything that was added is done. Raises the error of a generation that failed."""
        if self._last is not None:
            self._last.result()

    def text(self) -> str:
        """The whole text; for a program with roles the contents of its messages, joined by newlines."""
        self.sync()
        if self._said.in_roles:
            return "\n".join(message["content"] for message in self._said.messages)
        return self._said.text

    def messages(self) -> list[dict[str, str]]:
        """The messages of a program with roles."""
        self.sync()
        return [dict(message) for message in self._said.messages]

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Iterate over the text, or over one value, as it is generated. Raises the error of a program that fails."""
        place = 0
        while True:
            with self._news:
                while len(self._pieces) == place and not self._ended:
                    self._news.wait()
                pieces, ended = self._pieces[place:], self._ended
            place += len(pieces)
            for name, text in pieces:
                if text and (var_name is None or name == var_name):
                    yield text
            if ended and not pieces:
                if self.error is not None:
                    raise self.error
                return

    async def text_async_iter(self, var_name: str | None = None) -> AsyncIterator[str]:
        """The same as `text_iter`, for asyncio programs."""
        pieces = self.text_iter(var_name)
        while (piece := await asyncio.to_thread(next, pieces, _END)) is not _END:
            yield piece

    def end(self, error: BaseException | None = None) -> None:
        """The program adds nothing more: end all iterators."""
        with self._news:
            self.error = self.error or error
            self._ended = True
            self._news.notify_all()

    # ---- forks -------------------------------------------------------------------------------------------------

    def fork(self, size: int = 1) -> "ProgramStateGroup":
        """`size` states that continue independently from here. Their shared prefix is computed once."""
        before, made = self._last, Future[Any]()
        values = dict(self._values)
        states = [ProgramState(self._backend, self._defaults, after=made) for _ in range(size)]

        async def copy() -> None:
            try:
                if before is not None:
                    await asyncio.wrap_future(before)
                if size > 1:
                    prompt = self._said.prompt(answer=False)
                    if prompt.text or prompt.messages:
                        await self._backend.cache_prefix(prompt)
                for state in states:
                    state._said = self._said.copy()
                made.set_result(None)
            except BaseException as error:
                made.set_exception(error)

        self._last = LOOP.run(copy())
        for state in states:
            state._values = dict(values)
            state._meta = self._meta.copy()
        return ProgramStateGroup(self, states)


class ProgramStateGroup:
    """The forks of a state (SGLang's `ProgramStateGroup`). `forks["name"]` is the list of their values."""

    def __init__(self, parent: ProgramState, states: Sequence[ProgramState]) -> None:
        self._parent = parent
        self._states = list(states)

    def __getitem__(self, key: int | str) -> Any:
        return self._states[key] if isinstance(key, int) else [state[key] for state in self._states]

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __iadd__(self, other: Expression | str | Sequence[Expression | str]) -> "ProgramStateGroup":
        """Add one expression to each state, or the i-th of a list to the i-th state."""
        parts = [other] * len(self) if isinstance(other, Expression | str) else list(other)
        for state, part in zip(self._states, parts, strict=True):
            state += part
        return self

    def join(self, mode: str = "gather_variable") -> None:
        """Wait for all forks, and set the values that they added on their parent, as lists.

        Raises ValueError for a mode other than "gather_variable".
        """
        if mode != "gather_variable":
            raise ValueError(f"join knows gather_variable, not {mode!r}")
        for state in self._states:
            state.sync()
        names = dict.fromkeys(name for state in self._states for name in state._values)
        for name in names:
            if name not in self._parent._values:
                self._parent.set_var(name, [state[name] for state in self._states if name in state])


def _names(expression: Expression | None) -> Iterator[str]:
    """The names of the values that an expression sets."""
    match expression:
        case Several(parts):
            for part in parts:
                yield from _names(part)
        case Role(content=content):
            yield from _names(content)
        case Gen(name=str(name)) | Select(name=str(name)):
            yield name
