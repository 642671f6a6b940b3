"""Loading and unloading LoRA adapters while the server runs."""

from pathlib import Path
from typing import Any

from tokenyard.base import ConfigError, InvalidRequestError
from tokenyard.server.http.routes import Routes
from tokenyard.server.native.control_routes import Body, State
from tokenyard.server.protocol import LoadAdapterRequest, UnloadAdapterRequest, parse
from tokenyard.server.state import ServerState

routes = Routes()

FILES = ("adapter_config.json", "adapter_model.safetensors")


@routes.post("/load_lora_adapter")
@routes.post("/v1/load_lora_adapter", in_schema=False)
async def load_lora_adapter(state: State, body: Body) -> dict[str, Any]:
    """Load an adapter from a folder inside --lora-dirs; 400 without a change for one that cannot be served."""
    fields = parse(body, LoadAdapterRequest, strict=state.options.strict_api)
    if fields.lora_name in state.options.base_names:
        message = f"{fields.lora_name!r} is the name of the base model; choose another name"
        raise InvalidRequestError(message, param="lora_name")
    folder = _allowed(fields.lora_path, state.options.lora_dirs)
    await state.generator.adapters.load(fields.lora_name, str(folder))
    return _loaded(state)


@routes.post("/unload_lora_adapter")
@routes.post("/v1/unload_lora_adapter", in_schema=False)
async def unload_lora_adapter(state: State, body: Body) -> dict[str, Any]:
    """Unload an adapter. New requests for it are refused immediately; the response comes once its last request has
    ended and its memory is free.
    """
    fields = parse(body, UnloadAdapterRequest, strict=state.options.strict_api)
    await state.generator.adapters.unload(fields.lora_name)
    return _loaded(state)


def _loaded(state: ServerState) -> dict[str, Any]:
    loaded = state.generator.adapters.loaded.values()
    return {"success": True, "loaded_adapters": {adapter.name: adapter.folder for adapter in loaded}}


def _allowed(path: str, lora_dirs: tuple[str, ...]) -> Path:
    """The folder at `path`, if it and its files are inside one of `lora_dirs` once links are resolved.

    Raises ConfigError otherwise, with the same message whether or not the folder exists.
    """
    if not lora_dirs:
        raise ConfigError("adapters cannot be loaded: the server was started without --lora-dirs")
    roots = [Path(each).expanduser().resolve() for each in lora_dirs]
    given = Path(path)
    for root in roots:
        # A relative path is resolved in each of the folders.
        folder = (root / given).resolve() if "\0" not in path else root
        if folder != root and all(_is_inside(folder / name, roots) for name in ("", *FILES)) and folder.is_dir():
            return folder
    raise ConfigError(f"there is no adapter {path[:200]!r} in the folders of --lora-dirs")


def _is_inside(path: Path, roots: list[Path]) -> bool:
    resolved = path.resolve()
    return any(resolved.is_relative_to(root) for root in roots)
