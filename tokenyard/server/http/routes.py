"""Routes that do not generate, and their OpenAPI entries, read off the signatures of their handlers.

A framework with models for every argument doubled the imports of a start; these routes need a few words of it.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, compile_path

from tokenyard.base import InvalidRequestError

Handler = Callable[..., Awaitable[Any]]
Reader = Callable[[Request], Awaitable[Any]]

JSON = "application/json"
_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_JSON_TYPES: dict[type, str] = {str: "string", int: "integer", bool: "boolean"}


@dataclass(frozen=True, slots=True)
class Given:
    """Marks an argument of a handler, in `Annotated[type, Given(read)]`, that `read(request)` returns."""

    read: Reader


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a handler.

    read: its value from a request. Raises InvalidRequestError.
    parameter: its entry in the OpenAPI schema; None for one that is no parameter of the path or the query.
    """

    name: str
    read: Reader
    parameter: dict[str, Any] | None = None


class ApiRoute(Route):
    """One method of a path, answered by a handler; what it returns is sent as JSON unless it is a Response."""

    def __init__(self, method: str, path: str, handler: Handler, *, in_schema: bool) -> None:
        self._arguments = _arguments(handler, path)
        self._handler = handler
        super().__init__(path, self._answer, methods=[method], include_in_schema=in_schema)
        self.method = method
        # A GET route answers HEAD as well only where it says so.
        self.methods = {method}

    async def _answer(self, request: Request) -> Response:
        answer = await self._handler(**{each.name: await each.read(request) for each in self._arguments})
        if isinstance(answer, Response):
            return answer
        return Response(orjson.dumps(answer, option=orjson.OPT_NON_STR_KEYS), media_type=JSON)

    def operation(self) -> dict[str, Any]:
        """The route in the OpenAPI schema."""
        parameters = [each.parameter for each in self._arguments if each.parameter]
        return {
            "summary": self._handler.__name__.replace("_", " ").capitalize(),
            "description": inspect.getdoc(self._handler) or "",
            **({"parameters": parameters} if parameters else {}),
            "responses": {"200": {"description": "The answer"}},
        }


class Routes:
    """Collects the handlers of a module: `@routes.get("/path")` above a coroutine function.

    Its arguments are found by their annotations: `Request`; `Annotated` with `Given`; a `str` with the name of a
    parameter of the path; any other is an argument of the query and needs a default. Of the query are `str`, `bool`,
    `int` and `int | None`.
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self.all: list[ApiRoute] = []

    def on(self, method: str, path: str, *, in_schema: bool = True) -> Callable[[Handler], Handler]:
        """Have the decorated handler answer `method` at `path`."""

        def add(handler: Handler) -> Handler:
            self.all.append(ApiRoute(method, self._prefix + path, handler, in_schema=in_schema))
            return handler

        return add

    def get(self, path: str, *, in_schema: bool = True) -> Callable[[Handler], Handler]:
        """Have the decorated handler answer GET at `path`."""
        return self.on("GET", path, in_schema=in_schema)

    def post(self, path: str, *, in_schema: bool = True) -> Callable[[Handler], Handler]:
        """Have the decorated handler answer POST at `path`."""
        return self.on("POST", path, in_schema=in_schema)


def openapi_paths(routes: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """The `paths` of an OpenAPI schema with those of `routes` that are for it."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if isinstance(route, ApiRoute) and route.include_in_schema:
            paths.setdefault(compile_path(route.path)[1], {})[route.method.lower()] = route.operation()
    return paths


def _arguments(handler: Handler, path: str) -> list[Argument]:
    """How to find the arguments of a handler. Raises TypeError for an annotation that is not known."""
    in_path, hints = compile_path(path)[2], get_type_hints(handler, include_extras=True)
    return [
        _argument(name, hints[name], parameter.default, in_path)
        for name, parameter in inspect.signature(handler).parameters.items()
    ]


def _argument(name: str, kind: Any, default: Any, in_path: Mapping[str, Any]) -> Argument:
    if kind is Request:
        return Argument(name, _whole_request)
    if get_origin(kind) is Annotated:
        return Argument(name, next(each.read for each in get_args(kind) if isinstance(each, Given)))
    if name in in_path:
        entry = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        return Argument(name, lambda request: _of_path(request, name), entry)
    base = next((each for each in get_args(kind) if each is not NoneType), kind)
    if base not in _JSON_TYPES or default is inspect.Parameter.empty:
        raise TypeError(f"argument {name} of a route: it needs a default, and its type must not be {kind}")
    schema = {"type": _JSON_TYPES[base]} | ({} if default is None else {"default": default})
    entry = {"name": name, "in": "query", "required": False, "schema": schema}
    return Argument(name, lambda request: _of_query(request, name, base, default), entry)


async def _whole_request(request: Request) -> Request:
    return request


async def _of_path(request: Request, name: str) -> str:
    value: str = request.path_params[name]
    return value


async def _of_query(request: Request, name: str, kind: type, default: Any) -> Any:
    """An argument of the query, or its default. Raises InvalidRequestError for one that is not of its type."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if kind is bool:
        if text.lower() not in _BOOLEANS:
            raise InvalidRequestError(f"{name} must be true or false, not {text[:100]!r}", param=name)
        return _BOOLEANS[text.lower()]
    if kind is int:
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 19):
            raise InvalidRequestError(f"{name} must be an integer, not {text[:100]!r}", param=name)
        return int(text)
    return text
