"""Digests of weights. Engines with equal digests can share KV."""

from hashlib import blake2b
from pathlib import Path

from tokenyard.base import ConfigError

SAMPLE_BYTES = 1 << 20
DIGEST_BYTES = 16
ADAPTER_DIGEST_BYTES = 8
MAX_ADAPTER_BYTES = 8 << 30


def model_digest(folder: str, *facts: str) -> str:
    """A digest of a checkpoint's weights and config, and of further `facts` such as the seed of random weights.

    It covers the name, size and head (which lists the tensors) of each weight file, and samples at four offsets, so
    that it reads little of a large checkpoint.
    """
    digest = blake2b("\0".join(facts).encode(), digest_size=DIGEST_BYTES)
    path = Path(folder)
    for file in sorted((*path.glob("*.safetensors"), *path.glob("*.gguf"))) if path.is_dir() else ():
        size = file.stat().st_size
        digest.update(f"\0{file.name}\0{size}".encode())
        with file.open("rb") as content:
            for place in range(4):
                content.seek(place * max(size - SAMPLE_BYTES, 0) // 3)
                digest.update(content.read(SAMPLE_BYTES))
    config = path / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    return digest.hexdigest()


def adapter_digest(folder: str) -> str:
    """A digest of an adapter's config and of all its weights. Raises ConfigError if either is missing."""
    digest = blake2b(digest_size=ADAPTER_DIGEST_BYTES)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        path = Path(folder) / name
        try:
            size = path.stat().st_size
            if size > MAX_ADAPTER_BYTES:
                raise ConfigError(f"{path} has {size / 2**30:.1f} GiB; that is no adapter")
            digest.update(f"{name}\0{size}\0".encode())
            with path.open("rb") as content:
                while block := content.read(SAMPLE_BYTES):
                    digest.update(block)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read ({error.strerror}); an adapter is a folder as peft saves it, with safetensors"
            ) from error
    return digest.hexdigest()
