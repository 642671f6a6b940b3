"""Builds the native CPU kernels with the package where a C++ compiler is; without one the package has none.

A package without them builds them at first use where it can, and else computes with torch alone. An editable install
with TOKENYARD_BUILD_NATIVE=0 leaves that to who asks for it: its kernels are in the tree, not in the package.
"""

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("tokenyard") / "executor" / "native"


class NativeKernels(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the library into `lib/` beside its sources, for wheels and for editable installs alike."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build before files are collected; see hatchling."""
        elsewhere = version == "editable" and os.environ.get("TOKENYARD_BUILD_NATIVE") == "0"
        if self.target_name != "wheel" or sys.platform != "linux" or elsewhere:
            return
        folder = Path(self.root) / NATIVE
        # Loaded by its path: the package itself cannot be imported here, as its dependencies are not there yet.
        spec = importlib.util.spec_from_file_location("tokenyard_native_build", folder / "build.py")
        assert spec is not None
        assert spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        try:
            build.build_packaged()
        except (build.BuildError, OSError) as error:
            self.app.display_warning(f"no native CPU kernels in this package: {error}")
            return
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append(f"/{NATIVE.as_posix()}/lib/*.so")
