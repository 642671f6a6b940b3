"""`/docs`: the OpenAPI schema as one plain page that loads nothing from other hosts."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{font-size:.95em}summary{cursor:pointer;padding:.3rem 0}table{border-collapse:collapse;margin:.5rem 0 1rem}"
    "td,th{text-align:left;vertical-align:top;padding:.15rem 1rem .15rem 0}p{margin:.3rem 0}"
    "@media(prefers-color-scheme:dark){body{background:#16181d;color:#dde}a{color:#8bf}}"
)


def reference_page(schema: Mapping[str, Any]) -> str:
    """HTML with the paths of an OpenAPI schema, their descriptions and the fields of their bodies."""
    title = f"{schema['info']['title']} {schema['info']['version']}"
    parts = [
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
        '<p>Every field of every body is also in <a href="openapi.json">openapi.json</a>.</p>',
    ]
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            parts += _operation(schema, path, method, operation)
    return "".join([*parts, "</body></html>"])


def _operation(schema: Mapping[str, Any], path: str, method: str, operation: Mapping[str, Any]) -> Iterator[str]:
    text = operation.get("description") or operation.get("summary") or ""
    yield f"<details><summary><code><b>{method.upper()}</b> {escape(path)}</code></summary><p>{escape(text)}</p>"
    rows = [(item["name"], item.get("schema", {})) for item in operation.get("parameters", ())]
    rows += _body_fields(schema, operation)
    if rows:
        yield "<table><tr><th>field</th><th>type</th></tr>"
        for name, kind in rows:
            yield f"<tr><td><code>{escape(name)}</code></td><td>{escape(_type_name(kind))}</td></tr>"
        yield "</table>"
    yield "</details>"


def _body_fields(schema: Mapping[str, Any], operation: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    return list(schema["components"]["schemas"][name]["properties"].items()) if name else []


def _type_name(kind: Mapping[str, Any]) -> str:
    """The type of a JSON schema in a few words."""
    if "anyOf" in kind:
        return " or ".join(_type_name(option) for option in kind["anyOf"])
    if "$ref" in kind:
        return str(kind["$ref"]).rpartition("/")[2]
    if kind.get("type") == "array":
        return f"list of {_type_name(kind.get('items') or {})}"
    return str(kind.get("type", "anything"))
