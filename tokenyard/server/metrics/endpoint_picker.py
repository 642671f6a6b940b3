"""`GET /metrics/load`: the few gauges by which gateways choose an engine, cheap enough to poll many times a second.

The values come from the schedulers' last heartbeats, which arrive every half second. Querying the schedulers would cost
several times as much as the rest of the request.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenyard.server.http.streaming import Receive, Scope, Send
from tokenyard.server.metrics.loads import load_of
from tokenyard.server.metrics.table import COMPAT
from tokenyard.server.state import ServerState

LOAD_PATH = "/metrics/load"
GAUGES = {
    "running_requests": "requests that hold KV pages",
    "queued_requests": "requests that wait in the queue",
    "token_usage": "share of the KV pool in use by running requests",
}
_TYPE = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class EndpointPickerMetrics:
    """A plain ASGI endpoint, without the framework's layers."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        metrics, ours = state.metrics, {name: f"tokenyard_{name}" for name in GAUGES}
        self._names = [ours, *(COMPAT[engine] for engine in metrics.compat)]
        model = metrics.model.translate(_ESCAPES)
        self._labels = f'model="{model}",model_name="{model}"'

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        state = self._state
        snapshot = {} if state.phase == "loading" else await state.control.snapshot(0.0)
        body = gauges_text(load_of(snapshot), self._names, self._labels)
        if "vllm" in state.metrics.compat:
            page = state.metrics.page_size
            sizes = f'block_size="{page}",num_gpu_blocks="{int(snapshot.get("total_tokens", 0)) // page}"'
            body += f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{{self._labels},{sizes}}} 1\n"
        data = body.encode()
        headers = [_TYPE, (b"content-length", b"%d" % len(data))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data})


def gauges_text(load: Mapping[str, Any], names: Sequence[Mapping[str, str]], labels: str) -> str:
    """Prometheus text of `GAUGES` under each naming scheme of `names`.

    A scheme maps our names to the exported ones; gauges that it does not name are left out.
    """
    lines: list[str] = []
    for scheme in names:
        for gauge, text in GAUGES.items():
            if gauge in scheme:
                name = scheme[gauge]
                lines += (f"# HELP {name} {text}", f"# TYPE {name} gauge", f"{name}{{{labels}}} {load[gauge]:.10g}")
    return "\n".join(lines) + "\n"
