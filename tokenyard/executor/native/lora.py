"""LoRA adapters in native steps: the library keeps them in slots, next to the weights of the model."""

import numpy as np
import numpy.typing as npt
import torch

from tokenyard.executor.lora_manager import FUSED, no_memory
from tokenyard.executor.lora_weights import LoraWeights, Shapes, projection_shapes
from tokenyard.executor.native.model import NativeDecoder
from tokenyard.executor.native.runtime import address

PRODUCTS = (("qkv", "mixer_in"), ("output", "mixer_out"), ("gate_up",), ("down",))
"""Names in FUSED of the library's products, in its order. A layer has one of each at most."""


class NativeLoraPool:
    """LoraMemoryPool of a NativeDecoder."""

    def __init__(self, decoder: NativeDecoder, slots: int, rank: int) -> None:
        """Make room for `slots` adapters of ranks up to `rank`. Raises ConfigError without memory."""
        self._decoder, self._functions = decoder, decoder.engine.functions
        self.slot_bytes = int(self._functions.ty_model_slots(decoder.model, slots, rank))
        if self.slot_bytes < 0:
            raise no_memory(slots, rank)

    def put(self, slot: int, weights: LoraWeights) -> None:
        """Copy an adapter into a slot; see LoraMemoryPool."""
        for layer in range(self._decoder.config.num_layers):
            shapes = projection_shapes(self._decoder.config, layer)
            for which, products in enumerate(PRODUCTS):
                own = {name: shapes[name] for product in products for name in FUSED[product] if name in shapes}
                # Experts have no adapters.
                if own:
                    self._put(slot, layer, which, own, weights)

    def begin(self, slot_of_token: npt.NDArray[np.int64] | None) -> None:
        """Set the adapter slots of a step's tokens; see LoraMemoryPool."""
        self._decoder.adapters = None if slot_of_token is None else slot_of_token.astype(np.int32)

    def _put(self, slot: int, layer: int, which: int, shapes: Shapes, weights: LoraWeights) -> None:
        """Copy what an adapter changes of one product of these projections."""
        pairs = {name: pair for name in shapes if (pair := weights.pairs.get((layer, name))) is not None}
        rank = max((len(pair.a) for pair in pairs.values()), default=0)
        if not rank:
            self._functions.ty_model_adapter(self._decoder.model, slot, layer, which, 0, None, None)
            return
        inputs, outputs = next(iter(shapes.values()))[0], [outputs for _, outputs in shapes.values()]
        a = torch.zeros(len(shapes), rank, inputs, dtype=self._decoder.dtype)
        b = torch.zeros(sum(outputs), rank, dtype=self._decoder.dtype)
        for part, (name, own) in enumerate(zip(shapes, torch.split(b, outputs), strict=True)):
            pair = pairs.get(name)
            if pair is not None:
                a[part, : len(pair.a)] = pair.a
                own[:, : len(pair.a)] = pair.b.float() * pair.scale
        self._functions.ty_model_adapter(self._decoder.model, slot, layer, which, rank, address(a), address(b))
