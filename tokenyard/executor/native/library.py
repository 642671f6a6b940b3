"""Finds, builds and loads the native library, or reports in one line why it cannot. Needs no torch."""

import ctypes
import functools
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenyard.executor.native.build import PACKAGED, BuildError, build_library, library_name

logger = logging.getLogger(__name__)

DISABLE_VARIABLE = "TOKENYARD_DISABLE_NATIVE"
LEVEL_VARIABLE = "TOKENYARD_NATIVE_LEVEL"
LIBRARY_VARIABLE = "TOKENYARD_NATIVE_LIBRARY"
"""Environment variables for trials: the first makes as if there were no library, the second names the kernels, and the
third is the path of a library to use instead of any other."""

LEVELS = ("plain", "avx2", "avx512", "avx512-bf16", "neon-dotprod")
BF16, FLOAT32 = 0, 1
QKV, OUTPUT, GATE_UP, DOWN, HEAD, ROUTER = range(6)
Pointer = ctypes.c_void_p


class NativeConfig(ctypes.Structure):
    """ty_config of src/api.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("dtype", "int8", "layers", "hidden")),
        *((name, ctypes.c_int32) for name in ("inter", "heads", "kv_heads", "head_dim", "rotated", "gate")),
        ("embedding_format", ctypes.c_int32),
        ("kv_format", ctypes.c_int32),
        *((name, ctypes.c_int32) for name in ("shared", "output_gate")),
        *((name, ctypes.c_float) for name in ("eps", "gate_limit", "embedding_scale")),
        *((name, ctypes.c_float) for name in ("attention_scale", "attention_softcap", "logit_softcap")),
        *((name, ctypes.c_float) for name in ("residual_scale", "logit_scale")),
        ("vocabulary", ctypes.c_int64),
        *((name, Pointer) for name in ("windows", "cos_sin", "experts", "expert_layers")),
        *((name, Pointer) for name in ("recurrent", "recurrent_layers")),
    )


class NativeStep(ctypes.Structure):
    """ty_step of src/api.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "rows", "logit_count")),
        *(
            (name, Pointer)
            for name in ("token_ids", "positions", "slots", "pool_rows", "starts", "counts", "logit_tokens")
        ),
        ("page_table", Pointer),
        ("page_table_stride", ctypes.c_int64),
        ("page_size", ctypes.c_int32),
        ("fixed_order", ctypes.c_int32),
        ("logits", Pointer),
        ("kv", Pointer),
        ("plane_bytes", ctypes.c_int64),
        ("adapters", Pointer),
        ("window_kv", Pointer),
        ("window_plane_bytes", ctypes.c_int64),
        ("window_slots", Pointer),
        ("window_table", Pointer),
        ("window_table_stride", ctypes.c_int64),
        ("states", Pointer),
    )


class NativeRecurrent(ctypes.Structure):
    """ty_recurrent of src/api.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "groups", "heads", "key_dim", "value_dim")),
        *((name, ctypes.c_int32) for name in ("kernel", "channels")),
        *((name, ctypes.c_float) for name in ("step_min", "step_max")),
    )


class NativeStates(ctypes.Structure):
    """ty_states of src/api.h."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        *((name, Pointer) for name in ("firsts", "sources", "run_ends", "counts", "target_ends", "targets")),
        *((name, Pointer) for name in ("conv", "recurrent")),
        *((name, ctypes.c_int64) for name in ("conv_bytes", "recurrent_bytes")),
        ("kept", Pointer),
        ("kept_tokens", ctypes.c_int64),
    )


class NativeAttentionTask(ctypes.Structure):
    """ty_attention of src/api.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "head_dim", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, Pointer) for name in ("q", "keys", "values", "out", "sinks")),
    )


class NativeMoeLayers(ctypes.Structure):
    """ty_experts of src/api.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("dtype", "int8", "hidden", "inter")),
        *((name, ctypes.c_int32) for name in ("count", "active", "normed", "gate")),
        ("gate_limit", ctypes.c_float),
    )


class NoLibraryError(Exception):
    """The native library cannot be used here; the message is one line."""


class Library:
    """The loaded library and the kernels that are used of it: `level` and its `name`."""

    def __init__(self, path: Path) -> None:
        try:
            self.functions = ctypes.CDLL(str(path))
            _declare(self.functions)
        except (OSError, AttributeError) as error:
            raise NoLibraryError(f"{path} cannot be loaded: {error}") from error
        kinds = NativeConfig, NativeStep, NativeAttentionTask, NativeMoeLayers, NativeRecurrent, NativeStates
        sizes = [ctypes.sizeof(kind) for kind in kinds]
        if sizes != [self.functions.ty_size_of(i) for i in range(len(sizes))]:
            raise NoLibraryError(f"{path} was built from other sources")
        self.path = path
        self.level = self._choose_level()
        self.name = LEVELS[self.level]

    def levels(self) -> list[int]:
        """The kernel levels that both the library and this CPU support."""
        return [level for level in range(len(LEVELS)) if self.functions.ty_level_name(level)]

    def packed_instructions(self) -> str:
        """The instructions that multiply packed weights at the level that is used."""
        found: bytes = self.functions.ty_packed_instructions(self.level)
        return found.decode()

    def _choose_level(self) -> int:
        wanted = os.environ.get(LEVEL_VARIABLE)
        if not wanted:
            return int(self.functions.ty_best_level())
        if wanted not in LEVELS or LEVELS.index(wanted) not in self.levels():
            names = ", ".join(LEVELS[level] for level in self.levels())
            raise NoLibraryError(f"{LEVEL_VARIABLE} is {wanted!r}; on this CPU it can be {names}")
        return LEVELS.index(wanted)


def load_library() -> Library:
    """Return the library: the package's, or one built here before, or one that is built now and kept.

    Raises NoLibraryError, in one line; later calls raise the same error.
    """
    found = load_once()
    if isinstance(found, NoLibraryError):
        raise found
    return found


@functools.cache
def load_once() -> Library | NoLibraryError:
    """The library, or why there is none; the same for each call in a process."""
    if os.environ.get(DISABLE_VARIABLE):
        return NoLibraryError(f"{DISABLE_VARIABLE} is set")
    if sys.platform != "linux":
        return NoLibraryError(f"it is built for Linux only, not {sys.platform}")
    named = os.environ.get(LIBRARY_VARIABLE)
    try:
        if named:
            return Library(Path(named))
        name = library_name()
        for folder in (PACKAGED, cache_folder()):
            if (folder / name).is_file():
                return Library(folder / name)
        return Library(_build())
    except (NoLibraryError, BuildError, OSError, RuntimeError) as error:  # a RuntimeError where there is no home
        return NoLibraryError(str(error).split("\n")[0])


def cache_folder() -> Path:
    """Return the folder of libraries that were built at first use."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tokenyard"


def _build() -> Path:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _locked(folder / "build.lock"):
        # Another process may have built it while this one waited.
        target = folder / library_name()
        if not target.is_file():
            logger.info("building the native CPU kernels, once, with the C++ compiler of this machine")
            begin_s = time.perf_counter()
            build_library(folder)
            logger.info("built %s in %.1f s", target, time.perf_counter() - begin_s)
        return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that ends with the process."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _declare(functions: ctypes.CDLL) -> None:
    """Declare the functions of src/api.h. Raises AttributeError for one that is not there."""
    number, numbers, pointer = ctypes.c_int, ctypes.c_int64, Pointer
    kinds: dict[str, tuple[object, list[object]]] = {
        "ty_size_of": (numbers, [number]),
        "ty_best_level": (number, []),
        "ty_level_name": (ctypes.c_char_p, [number]),
        "ty_packed_instructions": (ctypes.c_char_p, [number]),
        "ty_active_is_bf16": (number, [number, number]),
        "ty_pool_new": (pointer, [number, pointer]),
        "ty_pool_free": (None, [pointer]),
        "ty_attention_new": (pointer, [pointer, *[number] * 5]),
        "ty_attention_prepare": (number, [pointer, ctypes.POINTER(NativeStep), pointer, number]),
        "ty_attention_run": (number, [pointer, ctypes.POINTER(NativeAttentionTask)]),
        "ty_attention_free": (None, [pointer]),
        "ty_model_new": (pointer, [pointer, number, ctypes.POINTER(NativeConfig)]),
        "ty_model_parts": (number, [pointer, *[number] * 4, pointer, pointer]),
        "ty_model_order": (None, [pointer, *[number] * 3, pointer]),
        "ty_model_measure": (numbers, [pointer]),
        "ty_model_place": (number, [pointer, pointer]),
        "ty_model_linear": (None, [pointer, *[number] * 4, pointer, pointer]),
        "ty_model_embedding": (None, [pointer, pointer]),
        "ty_model_vector": (None, [pointer, number, number, pointer]),
        "ty_model_slots": (numbers, [pointer, number, numbers]),
        "ty_model_adapter": (None, [pointer, number, number, number, numbers, pointer, pointer]),
        "ty_model_step": (number, [pointer, ctypes.POINTER(NativeStep)]),
        "ty_model_logits": (number, [pointer, pointer, numbers, pointer]),
        "ty_model_residual": (number, [pointer, pointer, numbers, pointer]),
        "ty_model_replay": (number, [pointer, ctypes.POINTER(NativeStates)]),
        "ty_model_free": (None, [pointer]),
        "ty_experts_new": (pointer, [pointer, number, ctypes.POINTER(NativeMoeLayers)]),
        "ty_experts_linear": (None, [pointer, number, number, pointer, pointer]),
        "ty_experts_run": (number, [pointer, pointer, numbers, pointer]),
        "ty_experts_free": (None, [pointer]),
        "ty_drawer_new": (pointer, [pointer, number, numbers]),
        "ty_drawer_run": (number, [pointer, pointer, numbers, numbers, *[pointer] * 7]),
        "ty_drawer_free": (None, [pointer]),
        "ty_part_multiple": (number, [number]),
        "ty_linear_new": (pointer, [pointer, number, number, numbers, number, number, pointer, pointer]),
        "ty_linear_set": (None, [pointer, number, pointer, pointer]),
        "ty_linear_run": (number, [pointer, pointer, numbers, pointer]),
        "ty_linear_free": (None, [pointer]),
        "ty_unpack_rows": (None, [number, pointer, pointer, numbers, numbers, pointer]),
    }
    for name, (result, arguments) in kinds.items():
        function = getattr(functions, name)
        function.restype = result
        function.argtypes = arguments
