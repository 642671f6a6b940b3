"""Loading and unloading LoRA adapters while the server runs."""

from pathlib import Path
from typing import Any

from fastapi import APIRouter

from tokenyard.base import ConfigError, InvalidRequestError
from tokenyard.server.native.control_routes import Body, State
from tokenyard.server.protocol import LoadAdapterRequest, UnloadAdapterRequest, parse
from tokenyard.server.state import ServerState

router = APIRouter()

FILES = ("adapter_config.json", "adapter_model.safetensors")


@router.post("/load_lora_adapter")
@router.post("/v1/load_lora_adapter", include_in_schema=False)
async def load_lora_adapter(state: State, body: Body) -> dict[str, Any]:
    """Load an adapter from below --lora-dirs; 400, and nothing changes, for one that cannot be served."""
    fields = parse(body, LoadAdapterRequest, strict=state.options.strict_api)
    if fields.lora_name in (state.options.model_name, "default"):
        message = f"{fields.lora_name!r} is the name of the model itself; choose another one"
        raise InvalidRequestError(message, param="lora_name")
    folder = _allowed(fields.lora_path, state.options.lora_dirs)
    await state.generator.adapters.load(fields.lora_name, str(folder))
    return _told(state)


@router.post("/unload_lora_adapter")
@router.post("/v1/unload_lora_adapter", include_in_schema=False)
async def unload_lora_adapter(state: State, body: Body) -> dict[str, Any]:
    """Unload an adapter: new requests for it are refused at once, and the answer comes when its last one has ended and
    its memory is free.
    """
    fields = parse(body, UnloadAdapterRequest, strict=state.options.strict_api)
    await state.generator.adapters.unload(fields.lora_name)
    return _told(state)


def _told(state: ServerState) -> dict[str, Any]:
    loaded = state.generator.adapters.loaded.values()
    return {"success": True, "loaded_adapters": {adapter.name: adapter.folder for adapter in loaded}}


def _allowed(path: str, below: tuple[str, ...]) -> Path:
    """The folder at `path`, if it and its files lie below one of the folders `below` when links are followed.

    Raises ConfigError otherwise, in the same words whether there is such a folder or not.
    """
    if not below:
        raise ConfigError("adapters cannot be loaded from here: the server was started without --lora-dirs")
    roots = [Path(each).expanduser().resolve() for each in below]
    given = Path(path)
    for root in roots:
        # A relative path counts from each of the folders.
        folder = (root / given).resolve() if "\0" not in path else root
        if folder != root and all(_is_below(folder / name, roots) for name in ("", *FILES)) and folder.is_dir():
            return folder
    raise ConfigError(f"there is no adapter {path[:200]!r} below the folders of --lora-dirs")


def _is_below(path: Path, roots: list[Path]) -> bool:
    resolved = path.resolve()
    return any(resolved.is_relative_to(root) for root in roots)
