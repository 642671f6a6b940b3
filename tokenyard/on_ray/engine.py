"""Deprecated import path of `tokenyard.on_ray.deployment`, kept for one more release: Serve configs name it."""

import warnings

from tokenyard.on_ray.deployment import EngineDeployment, build

__all__ = ["EngineDeployment", "build"]

warnings.warn("tokenyard.on_ray.engine is deprecated; use tokenyard.on_ray.deployment", FutureWarning, stacklevel=2)
