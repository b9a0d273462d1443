"""Signs of floating-point numbers, changed without arithmetic, which would change the bits of some NaNs."""

from __future__ import annotations

from savestream.arrays.elements import HostArray

__all__ = ["SIGNED_DTYPES", "flip_signs"]

_COMPLEX = frozenset({"complex32", "complex64", "complex128"})
SIGNED_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"}) | _COMPLEX


def flip_signs(elements: HostArray, dtype: str, *, conjugate: bool, negate: bool) -> None:
    """Conjugate and negate, in place, a C-contiguous array of one of ``SIGNED_DTYPES``."""
    parts = 2 if dtype in _COMPLEX else 1
    nbytes = elements.dtype.itemsize // parts
    words = elements.reshape(-1).view(f"u{nbytes}")
    sign = words.dtype.type(1 << (8 * nbytes - 1))
    if negate:
        words[::parts] ^= sign
    if parts == 2 and conjugate != negate:
        words[1::2] ^= sign
