"""Splitting numeric frames into byte planes, and merging planes back.

Plane ``k`` of a frame holds byte ``k`` of every element, in memory order: the frame ``a0 a1 b0 b1 c0 c1`` of two-byte
elements has the planes ``a0 b0 c0`` and ``a1 b1 c1``. Exponents and signs then lie together, where an entropy coder
finds them. Memory order makes the split blind to the byte order of the elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bytes", "PlaneMerger", "extract_plane", "gather_samples", "plane_width"]

Bytes: TypeAlias = NDArray[np.uint8]

# Little-endian on every host, so that truncation keeps the byte at the lowest address.
_UNSIGNED = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}

_MAXIMUM_PLANE_BYTES = 0xFFFFFFFF  # the payload states plane lengths in 32 bits

_SAMPLES_PER_PLANE = 4
_SAMPLE_BYTES = 8 * 1024


def plane_width(itemsize: int, raw_length: int) -> int:
    """Number of planes of a numeric frame, or 0 where it has none.

    Elements of 2, 4 and 8 bytes have one plane a byte; 16 bytes (complex128) count as two elements of 8.
    """
    width = 8 if itemsize == 16 else itemsize
    if width not in (2, 4, 8) or not width <= raw_length <= width * _MAXIMUM_PLANE_BYTES:
        return 0
    return width


def extract_plane(source: Bytes, width: int, plane: int, output: Bytes) -> None:
    """Copy byte ``plane`` of every ``width``-byte element of ``source`` to ``output``.

    Elements are read as integers that start ``plane`` bytes late and truncated to one byte: one vectorised pass, four
    times as fast as a strided copy of single bytes. The last element would read beyond the frame and is copied alone.
    """
    count = len(output)
    late = np.ndarray((count - 1,), _UNSIGNED[width], buffer=source, offset=plane)
    np.copyto(output[: count - 1], late, casting="unsafe")
    output[count - 1] = source[(count - 1) * width + plane]


def gather_samples(source: Bytes, width: int) -> Bytes | None:
    """Sample every plane in four places, all in one copy.

    Returns
    -------
    Array of shape (width, 32768), or None where the planes are hardly longer than that.
    """
    count = len(source) // width
    stride = count // _SAMPLES_PER_PLANE
    if stride < 2 * _SAMPLE_BYTES:
        return None
    quarters = source[: _SAMPLES_PER_PLANE * stride * width].reshape(_SAMPLES_PER_PLANE, stride, width)
    start = (stride - _SAMPLE_BYTES) // 2
    samples = np.empty((width, _SAMPLES_PER_PLANE, _SAMPLE_BYTES), np.uint8)
    np.copyto(samples, quarters[:, start : start + _SAMPLE_BYTES].transpose(2, 0, 1))
    return samples.reshape(width, -1)


class PlaneMerger:
    """Merges byte planes pair by pair: bytes to 2-byte integers, those to 4-byte ones, and so on.

    Each merge is two vectorised passes; writing single bytes at a stride is 1.5 to 3 times slower. Owns scratch
    memory of less than twice the largest frame seen. Not thread-safe: one for each thread.
    """

    def __init__(self) -> None:
        self._scratch: dict[tuple[int, int], Bytes] = {}

    def scratch(self, width: int, slot: int, count: int) -> Bytes:
        """Uninitialised bytes for ``count`` integers of ``width`` bytes; slot 0 holds lower halves, 1 upper ones."""
        length = width * count
        buffer = self._scratch.get((width, slot))
        if buffer is None or len(buffer) < length:
            buffer = self._scratch[width, slot] = np.empty(length, np.uint8)
        return buffer[:length]

    def merge(self, read_plane: Callable[[int, int], Bytes], width: int, output: Bytes) -> None:
        """Fill ``output`` with elements of ``width`` bytes.

        Parameters
        ----------
        read_plane
            Called with plane and scratch slot, once for each plane in rising order; returns the plane's bytes. A
            plane of one value may be an array with stride 0.
        output
            Contiguous, ``width`` bytes for each byte of a plane.
        """
        count = len(output) // width
        merged = self._assemble(read_plane, 0, width, output.view(_UNSIGNED[width]), 0)
        if merged.strides == (0,) and count > 0:
            output.view(_UNSIGNED[width])[:] = merged

    def _assemble(
        self,
        read_plane: Callable[[int, int], Bytes],
        first: int,
        width: int,
        output: NDArray[np.unsignedinteger] | None,
        slot: int,
    ) -> NDArray[np.unsignedinteger]:
        """Integers of planes ``first`` to ``first + width - 1``; with stride 0 where all are one value."""
        if width == 1:
            return read_plane(first, slot)
        half = width // 2
        lower = self._assemble(read_plane, first, half, None, 0)
        upper = self._assemble(read_plane, first + half, half, None, 1)
        kind = _UNSIGNED[width]
        if lower.strides == upper.strides == (0,):
            value = int(lower[0]) | int(upper[0]) << (8 * half)
            return np.broadcast_to(np.array(value, kind), lower.shape)
        if output is None:
            output = self.scratch(width, slot, len(lower)).view(kind)
        _interleave(lower, upper, half, output)
        return output


def _interleave(
    lower: NDArray[np.unsignedinteger],
    upper: NDArray[np.unsignedinteger],
    half: int,
    output: NDArray[np.unsignedinteger],
) -> None:
    """``output = lower | upper << (8 * half)``, with the shift done by widening into memory ``half`` bytes later."""
    count = len(output)
    late = np.ndarray((count - 1,), output.dtype, buffer=output, offset=half)
    np.copyto(late, upper[: count - 1], casting="unsafe")
    halves = output.view(lower.dtype)
    halves[0] = 0
    halves[-1] = upper[-1]
    np.bitwise_or(output, lower, out=output)
