"""The ASGI application: routes, error handlers and the OpenAPI page."""

from pathlib import Path
from typing import Any

import msgspec
import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tokenyard.base import TokenyardError
from tokenyard.base.version import __version__
from tokenyard.server.anthropic import messages
from tokenyard.server.http.api_keys import Authentication
from tokenyard.server.http.api_reference import reference_page
from tokenyard.server.http.cross_site import CrossSiteGuard
from tokenyard.server.http.dialects import dialect_of
from tokenyard.server.http.errors import (
    CLIENT_GONE_STATUS,
    HttpError,
    error_headers,
    internal_error,
    outcome_of,
)
from tokenyard.server.http.generation_route import GenerationRoute, Handler
from tokenyard.server.http.routes import openapi_paths
from tokenyard.server.http.streaming import ClientGoneError, Receive, Scope, Send
from tokenyard.server.metrics.endpoint_picker import LOAD_PATH, EndpointPickerMetrics
from tokenyard.server.native import control_routes, lora_routes, policy_routes, request_routes, score, weight_routes
from tokenyard.server.native import generate as native
from tokenyard.server.native.live_feed import LiveFeed
from tokenyard.server.ollama import api as ollama
from tokenyard.server.openai import batches, embeddings, response_store, responses
from tokenyard.server.openai import completions as openai
from tokenyard.server.protocol import ChatRequest, CompletionRequest, NativeRequest
from tokenyard.server.state import ServerState
from tokenyard.ui.files import HEADERS, SERVER_PAGE, read_file

HOT_ROUTES: dict[str, tuple[Handler, type[Any]]] = {
    "/v1/chat/completions": (openai.chat_completions, ChatRequest),
    "/v1/completions": (openai.completions, CompletionRequest),
    "/generate": (native.generate, NativeRequest),
    "/v1/score": (score.score, score.ScoreRequest),
    "/v1/embeddings": (embeddings.embeddings, embeddings.EmbeddingsRequest),
    "/v1/rerank": (embeddings.rerank, embeddings.RerankRequest),
    "/v2/rerank": (embeddings.rerank, embeddings.RerankRequest),
    "/rerank": (embeddings.rerank, embeddings.RerankRequest),
    "/score": (embeddings.score_pairs, embeddings.PairsRequest),
    "/api/embed": (embeddings.ollama_embed, embeddings.OllamaEmbed),
    "/v1/messages": (messages.messages, messages.MessagesRequest),
    "/v1/messages/count_tokens": (messages.count_tokens, messages.CountRequest),
    "/v1/responses": (responses.responses, responses.ResponsesRequest),
    "/v1/responses/input_tokens": (responses.input_tokens, responses.ResponsesRequest),
    "/v1/responses/compact": (responses.compact, responses.ResponsesRequest),
    "/api/chat": (ollama.chat, ollama.OllamaChat),
    "/api/generate": (ollama.generate, ollama.OllamaGenerate),
}

MODULES = (
    control_routes,
    request_routes,
    policy_routes,
    lora_routes,
    weight_routes,
    ollama,
    response_store,
    batches,
)
"""The modules that have `routes`."""

NOT_OFFERED: tuple[tuple[str, str], ...] = (
    ("/v1/classify", "classification, as the model that is served generates text"),
    ("/classify", "classification, as the model that is served generates text"),
    ("/v1/audio", "audio"),
    ("/v1/images", "images"),
    ("/v1/moderations", "moderation"),
    ("/v1/assistants", "assistants, as it keeps no state between requests"),
    ("/v1/threads", "threads, as it keeps no state between requests"),
    ("/v1/responses/", "other operations on responses than GET and DELETE: none runs in the background"),
    ("/v1/conversations", "conversations; previous_response_id continues a stored response"),
    ("/v1/fine_tuning", "training"),
    ("/api/embeddings", "Ollama's old embeddings path; use /api/embed or /v1/embeddings"),
    ("/api/pull", "downloading models: it serves the one that it was started with"),
    ("/api/push", "uploading models: it serves the one that it was started with"),
    ("/api/create", "creating models: it serves the one that it was started with"),
    ("/api/copy", "copying models: it serves the one that it was started with"),
    ("/api/delete", "deleting models: it serves the one that it was started with"),
    ("/api/blobs", "storing models: it serves the one that it was started with"),
)
GENERATING = (
    "/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /generate, /api/chat and /api/generate"
)


class HotRouteApp:
    """Dispatches generating routes and `/metrics/load` directly, without the framework's layers, and the rest to it."""

    def __init__(self, app: ASGIApp, routes: dict[str, GenerationRoute], picker: EndpointPickerMetrics) -> None:
        self._app = app
        self._routes = routes
        self._picker = picker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        route: ASGIApp | None = None
        if scope["type"] == "http" and scope["method"] == "POST":
            route = self._routes.get(scope["path"])
        elif scope["type"] == "http" and scope["path"] == LOAD_PATH and scope["method"] == "GET":
            route = self._picker
        await (route or self._app)(scope, receive, send)


def create_app(state: ServerState) -> ASGIApp:
    """The application over `state`."""
    hot = {path: GenerationRoute(state, handler) for path, (handler, _) in HOT_ROUTES.items()}
    routes = [
        Route("/docs", _docs),
        Route("/openapi.json", _schema),
        Route("/v1/live", LiveFeed(state), methods=["GET"]),
        *(Route(path, _page_file) for path in SERVER_PAGE),
        *(route for module in MODULES for route in module.routes.all),
        # The framework has these paths too, so that it answers other methods with 405.
        *(Route(path, route, methods=["POST"]) for path, route in hot.items()),
    ]
    api = Starlette(routes=routes, exception_handlers=EXCEPTION_HANDLERS)
    api.state.server = state
    app: ASGIApp = HotRouteApp(api, hot, EndpointPickerMetrics(state))
    options = state.options
    room = batches.SpareRoom(state)
    state.observer_factories.append(room.observe)
    api.state.batches = None
    if options.file_storage_path:
        max_bytes = int(options.max_file_storage_mb * 1_000_000)
        folder = Path(options.file_storage_path).expanduser()
        api.state.batches = batches.make_batches(folder, max_bytes, app, state, room)
    if options.api_key or options.admin_api_key or options.tenant_keys:
        app = Authentication(
            app,
            api_key=options.api_key,
            admin_api_key=options.admin_api_key,
            tenant_keys=options.tenant_keys,
        )
    if not options.api_key and not options.tenant_keys:
        app = CrossSiteGuard(app, allowed_origins=options.cors_allow_origins, loopback_only=options.loopback_only)
    if options.cors_allow_origins:
        app = CORSMiddleware(app, options.cors_allow_origins, allow_methods=["*"], allow_headers=["*"])
    return app


async def _page_file(request: Request) -> Response:
    """A file of the live page. The files are open to all, as they hold no data; the data comes from `/v1/live`."""
    name, content_type = SERVER_PAGE[request.url.path]
    return Response(read_file(name), headers=HEADERS, media_type=content_type)


async def _docs(request: Request) -> HTMLResponse:
    """The API reference as a page."""
    return HTMLResponse(reference_page(_openapi(request.app)))


async def _schema(request: Request) -> Response:
    """The OpenAPI schema."""
    return Response(orjson.dumps(_openapi(request.app)), media_type="application/json")


def _error_response(error: TokenyardError, path: str = "") -> Response:
    """An error as a whole response, in the shape of the API at `path`."""
    status = outcome_of(error).status
    return Response(dialect_of(path).error(error), status, error_headers(status), "application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    """Errors of ours."""
    assert isinstance(error, TokenyardError)
    return _error_response(error, request.url.path)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    """The client has disconnected; no one reads the answer."""
    return Response(status_code=CLIENT_GONE_STATUS)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    if error.status_code == 405:
        refusal = HttpError("method_not_allowed", f"this path does not allow that method: {method} {path}")
    else:
        refusal = HttpError("not_found", nothing_at(method, path))
    response = _error_response(refusal, path)
    response.headers.update(error.headers or {})
    return response


def nothing_at(method: str, path: str) -> str:
    """The message of a 404: whether the path belongs to a known API that is not offered, and what is offered."""
    for prefix, what in NOT_OFFERED:
        if path.startswith(prefix):
            return f"{method} {path}: this server does not offer {what}. Text is generated at {GENERATING}"
    return f"there is nothing at this path: {method} {path}. Text is generated at {GENERATING}; /docs lists all paths"


async def _on_fault(request: Request, error: Exception) -> Response:
    """An internal error; uvicorn logs the traceback."""
    return _error_response(internal_error())


EXCEPTION_HANDLERS = {
    TokenyardError: _on_error,
    ClientGoneError: _on_client_gone,
    HTTPException: _on_http_exception,
    Exception: _on_fault,
}


def _openapi(app: Starlette) -> dict[str, Any]:
    """The schema: routes by the signatures of their handlers, hot ones by the classes that parse them."""
    kinds = [kind for _, kind in HOT_ROUTES.values()]
    refs, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    paths = openapi_paths(app.routes)
    for (path, (handler, _)), ref in zip(HOT_ROUTES.items(), refs, strict=True):
        content = {"application/json": {"schema": ref}}
        paths[path] = {
            "post": {
                "summary": (handler.__doc__ or "").strip(),
                "requestBody": {"required": True, "content": content},
                "responses": {"200": {"description": "The answer, or a stream of events"}},
            }
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tokenyard", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
