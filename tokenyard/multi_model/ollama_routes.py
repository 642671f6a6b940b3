"""The paths of Ollama's API that are about models: list, show, ps, pull, copy and delete."""

from typing import Any

import orjson

from tokenyard.base import ConfigError, InvalidRequestError
from tokenyard.base.version import __version__
from tokenyard.multi_model.model_router import ModelRouter
from tokenyard.multi_model.residency import LOADED
from tokenyard.router.client_connection import ClientRequest
from tokenyard.router.dispatch_driver import Answer, OwnRoute
from tokenyard.router.errors import RouterError
from tokenyard.server.ollama.entries import list_entry, loaded_entry, shown


class OllamaRoutes:
    """Answers them for the models of a router."""

    def __init__(self, router: ModelRouter) -> None:
        self._router, self._catalog = router, router.catalog

    def routes(self) -> dict[str, OwnRoute]:
        """The paths and what answers them."""
        return {
            "/api/version": OwnRoute(b"GET", False, lambda _: (200, {"version": __version__})),
            "/api/tags": OwnRoute(b"GET", False, self._tags),
            "/api/ps": OwnRoute(b"GET", False, self._ps),
            "/api/show": OwnRoute(b"POST", False, self._show),
            "/api/pull": OwnRoute(b"POST", True, self._pull),
            "/api/copy": OwnRoute(b"POST", True, self._copy),
            "/api/delete": OwnRoute(b"DELETE", True, self._delete),
        }

    def _tags(self, request: ClientRequest) -> Answer:
        """All models that are there, with their copies."""
        self._router.refresh()
        names = [*self._catalog, *sorted(self._catalog.copies)]
        return 200, {"models": [list_entry(name, self._catalog[self._catalog.find(name)].facts) for name in names]}

    def _ps(self, request: ClientRequest) -> Answer:
        """The models that are in memory."""
        router = self._router
        loaded = [model for model in router.residency if model.phase == LOADED]
        return 200, {
            "models": [
                loaded_entry(
                    model.name,
                    self._catalog[model.name].facts,
                    size=model.need,
                    context_length=router.context_length(model.name),
                    expires_s=router.expires_s(model.name),
                )
                for model in loaded
            ]
        }

    def _show(self, request: ClientRequest) -> Answer:
        """What the files of a model say."""
        name = self._named(request, "model", "name")
        plan, router = self._catalog[name], self._router
        length = router.context_length(name)
        return 200, shown(plan.facts, template=plan.template, context_length=length, capabilities=plan.capabilities)

    def _pull(self, request: ClientRequest) -> Answer:
        """Find a model in the folders; nothing is downloaded."""
        self._router.refresh()
        self._named(request, "model", "name")
        lines = [{"status": "pulling manifest"}, {"status": "success"}]
        if _fields(request).get("stream") is False:
            return 200, lines[-1]
        return 200, b"".join(orjson.dumps(line) + b"\n" for line in lines)

    def _copy(self, request: ClientRequest) -> Answer:
        """Give a model a second name, until the server ends."""
        source, destination = self._named(request, "source"), _fields(request).get("destination")
        if not isinstance(destination, str):
            raise InvalidRequestError("destination must be a name", param="destination")
        try:
            self._catalog.copy(source, destination)
        except ConfigError as error:
            raise InvalidRequestError(error.message, param="destination") from None
        return 200, b""

    def _delete(self, request: ClientRequest) -> Answer:
        """Remove a second name. Files are the operator's and are not deleted."""
        name = self._named(request, "model", "name")
        given = _fields(request)
        if not self._catalog.remove_copy(given.get("model") or given["name"]):
            what = f"{self._catalog[name].path} is not this server's to delete; delete the file and start it again"
            raise RouterError(403, what, code="not_allowed", param="model")
        return 200, b""

    def _named(self, request: ClientRequest, *keys: str) -> str:
        """The model that the first of `keys` in the body names. Raises RouterError (404) if it is not there, and
        InvalidRequestError if none is named.
        """
        fields = _fields(request)
        given = next((fields[key] for key in keys if fields.get(key)), None)
        if not isinstance(given, str):
            raise InvalidRequestError(f"{keys[0]} must name a model", param=keys[0])
        name = self._catalog.find(given)
        if not name:
            raise RouterError(404, f"model {given[:256]!r} not found", code="model_not_found", param=keys[0])
        return name


def _fields(request: ClientRequest) -> dict[str, Any]:
    """The body. Raises InvalidRequestError unless it is a JSON object."""
    try:
        fields = orjson.loads(request.body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is no JSON: {error.msg}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise InvalidRequestError("the body must be a JSON object", code="invalid_json")
    return fields
