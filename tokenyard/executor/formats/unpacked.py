"""A list of the quantized matrices of a checkpoint that were unpacked, for the log."""

import logging

logger = logging.getLogger(__name__)


class UnpackedMatrices:
    """Counts matrices by their kind, with the bytes that they had and have."""

    def __init__(self) -> None:
        self._kinds: dict[str, list[tuple[str, int, int]]] = {}

    def add(self, kind: str, name: str, stored: int, unpacked: int) -> None:
        """Add a matrix. stored, unpacked: its bytes in the checkpoint and in memory."""
        self._kinds.setdefault(kind, []).append((name, stored, unpacked))

    def log(self) -> None:
        """Log one line for each kind."""
        for kind, matrices in self._kinds.items():
            stored, unpacked = sum(one[1] for one in matrices) / 1e6, sum(one[2] for one in matrices) / 1e6
            logger.info(
                "%s is unpacked: %d matrices (%s%s) take %.0f MB, %.0f MB in the checkpoint",
                *(kind, len(matrices), matrices[0][0], ", ..." if len(matrices) > 1 else "", unpacked, stored),
            )
