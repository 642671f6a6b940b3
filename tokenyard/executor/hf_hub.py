"""Resolves the name of a model to its folder. Needs no torch."""

from pathlib import Path

from tokenyard.base import ConfigError
from tokenyard.executor.gguf_file.folder import folder_of_gguf

LFS_POINTER = b"version https://git-lfs"
HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def resolve_model_path(path: str) -> Path:
    """Return the folder of a model: `path` itself, the folder made for a GGUF file, or a download of the Hugging Face
    repository of that name.

    Raises ConfigError if there is none of these.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        _check_large_files(folder)
        return folder
    if folder.exists() and folder.suffix == ".gguf":
        return folder_of_gguf(folder)
    if folder.exists():
        raise ConfigError(f"model {path!r} is a file; give the folder that holds its config.json, or a .gguf file")
    if is_path(path):
        raise ConfigError(f"there is no model folder {path!r}")
    return _download(path)


def _check_large_files(folder: Path) -> None:
    """Raise ConfigError where `git clone` without Git LFS has left pointers in place of large files."""
    for path in [folder / "tokenizer.json", *sorted(folder.glob("*.safetensors"))]:
        if path.is_file():
            with path.open("rb") as file:
                begin = file.read(len(LFS_POINTER))
            if begin == LFS_POINTER:
                raise ConfigError(f"{path} is only a pointer of Git LFS; run `git lfs pull` in its folder")


def is_path(name: str) -> bool:
    """Whether `name` can only be meant as a path: names on the hub are `owner/name`."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def _download(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        message = f"there is no model folder {name!r}, and huggingface_hub, which could download it, is not installed"
        raise ConfigError(message) from error
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except Exception as error:  # the hub client raises errors of several libraries; all mean the same to the user
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(f"there is no model folder {name!r}, and it could not be downloaded: {reason}") from error
