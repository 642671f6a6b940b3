"""The formats of weights that a back end multiplies without unpacking them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format of matrices whose rows are blocks of `inputs` numbers in `block_bytes` bytes.

    name: as in messages; of GGUF's formats GGUF's.
    number: the native library's, see src/api.h.
    """

    name: str
    number: int
    inputs: int
    block_bytes: int

    def row_bytes(self, inputs: int) -> int:
        """Bytes of a row of so many numbers. Raises ValueError where they are no whole blocks."""
        if inputs % self.inputs:
            raise ValueError(f"{self.name} has blocks of {self.inputs} numbers, and a row has {inputs}")
        return inputs // self.inputs * self.block_bytes


FORMATS = {
    found.name: found
    for found in (
        WeightFormat("Q4_0", 2, 32, 18),
        WeightFormat("Q8_0", 3, 32, 34),
        WeightFormat("Q4_K", 4, 256, 144),
        WeightFormat("Q6_K", 5, 256, 210),
        WeightFormat("Q4_1", 6, 32, 20),
        WeightFormat("Q5_0", 7, 32, 22),
        WeightFormat("Q5_1", 8, 32, 24),
        WeightFormat("Q5_K", 9, 256, 176),
        WeightFormat("IQ4_NL", 10, 32, 18),
        WeightFormat("IQ4_XS", 11, 256, 136),
        WeightFormat("MXFP4", 12, 32, 17),
        WeightFormat("INT4_32", 13, 32, 21),
        WeightFormat("INT4_128", 14, 128, 69),
        WeightFormat("INT8_32", 15, 32, 36),
        WeightFormat("INT8_128", 16, 128, 132),
        WeightFormat("FP8_32", 17, 32, 36),
        WeightFormat("FP8_128", 18, 128, 132),
    )
}
"""By name."""

STORED, INT8 = 0, 1
"""The library's numbers of weights that are numbers of the model's dtype, and of those that it rounds to int8."""
