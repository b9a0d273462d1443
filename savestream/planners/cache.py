"""Plans kept for states that have not changed, and the fingerprint that tells."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import xxhash

from savestream.errors import PlanError
from savestream.planners.aliasing import alias_partition
from savestream.planners.flattening import SHARDED, VALUE, FlatState
from savestream.planners.recorded import class_name
from savestream.planners.shard_aliases import shard_aliases
from savestream.planners.sharding import shard_chunks, shard_dtype

__all__ = ["CacheStatistics", "PlanCache", "fingerprint"]

_PIECE_BYTES = 1 << 16  # xxhash keeps the GIL up to here; a release beside a busy thread costs milliseconds


class CacheStatistics(msgspec.Struct, frozen=True):
    """How often a cache was asked and knew, and how much it holds."""

    hits: int
    misses: int
    entries: int


class PlanCache:
    """Finished plans by fingerprint; the least recently used one is forgotten first.

    An object of its own, owned by a manager or passed to each save: no two planners or models share plans by accident.
    May be used from several threads.

    Parameters
    ----------
    max_entries
        Plans to keep.
    """

    def __init__(self, max_entries: int = 4) -> None:
        if isinstance(max_entries, bool) or not isinstance(max_entries, int) or max_entries < 1:
            raise PlanError(f"max_entries={max_entries!r}: must be an integer of at least 1")
        self._max_entries = max_entries
        self._entries: OrderedDict[bytes, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._hits = 0
        self._misses = 0

    def get(self, fingerprint: bytes) -> Any:
        """What was put under this fingerprint, or None."""
        with self._lock:
            try:
                self._entries.move_to_end(fingerprint)
            except KeyError:
                self._misses += 1
                return None
            self._hits += 1
            return self._entries[fingerprint]

    def put(self, fingerprint: bytes, value: object) -> None:
        """Keep a plan. Call this only after the save that used it was committed."""
        with self._lock:
            self._entries[fingerprint] = value
            self._entries.move_to_end(fingerprint)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)

    def clear(self) -> None:
        """Forget all plans."""
        with self._lock:
            self._entries.clear()

    def statistics(self) -> CacheStatistics:
        """Hits and misses so far, and entries now."""
        with self._lock:
            return CacheStatistics(self._hits, self._misses, len(self._entries))


def fingerprint(flat: FlatState, opaque_lengths: Mapping[str, tuple[str, int]], *extra: bytes) -> bytes:
    """XXH3-128 over everything of a state that its plan depends on.

    Names (which are the typed paths), container classes, type, dtype, shape, strides and boxes of each leaf, the
    alias partition, and the encodings and lengths of opaque values. Contents, addresses and the lengths of inline
    values do not count, nor does anything that differs between processes.

    Parameters
    ----------
    flat
        The flattened state.
    opaque_lengths
        Encoding and length in bytes of each value that is not stored inline, by name.
    extra
        Whatever else the plan depends on: planner, options, rank, world size, format version.

    Returns
    -------
    bytes
        16 bytes.
    """
    digest = xxhash.xxh3_128()
    names = "\n".join(flat.names).encode(errors="surrogatepass")
    lengths = np.fromiter(map(len, flat.names), np.uint32, len(flat.names))
    codes, table = _signatures(flat)
    partition = alias_partition(flat)
    aliases = np.array(list(partition.items()), np.uint64).tobytes()
    boxes = repr(list(shard_aliases(flat, partition).items())).encode()
    opaque = repr(sorted((name, *entry) for name, entry in opaque_lengths.items())).encode()
    tokens = msgspec.json.encode(flat.tokens)
    for part in (names, lengths.tobytes(), codes, table, tokens, bytes(flat.kinds), aliases, boxes, opaque, *extra):
        _update(digest, len(part).to_bytes(8, "little"))
        _update(digest, part)
    return digest.digest()


def _update(digest: Any, data: bytes) -> None:
    view = memoryview(data)
    for offset in range(0, len(view), _PIECE_BYTES):
        digest.update(view[offset : offset + _PIECE_BYTES])


def _signatures(flat: FlatState) -> tuple[bytes, bytes]:
    """The kind of each array as a number; and the table of these kinds, with the sharded ones by position."""
    table: dict[Any, int] = {}
    number = table.setdefault
    codes = [
        number((leaf.dtype, leaf.shape, leaf.strides), len(table))
        for leaf in (flat.leaves if np.ndarray in flat.types else ())
        if type(leaf) is np.ndarray
    ]
    rows = [repr(key) for key in table]
    if len(codes) + flat.kinds.count(VALUE) < len(flat.leaves):
        rows += _other_signatures(flat, codes)
    return np.fromiter(codes, np.uint32, len(codes)).tobytes(), "\n".join(rows).encode()


def _other_signatures(flat: FlatState, codes: list[int]) -> list[str]:
    """Append the kinds of the other arrays to ``codes``; the table of these kinds, then the sharded arrays."""
    described = flat.described_arrays()
    codes += described.firsts
    whole = isinstance(described.positions, range)
    positions = "all" if whole else np.array(described.positions, np.uint32).tobytes().hex()
    rows = [f"{first} {class_name(type(flat.leaves[first]))} {info!r}" for first, info in described.infos.items()]
    sharded = [repr(_sharded_signature(flat, position)) for position in flat.positions(SHARDED)]
    return [*rows, positions, *sharded]


def _sharded_signature(flat: FlatState, position: int) -> tuple[Any, ...]:
    leaf, name = flat.leaves[position], flat.names[position]
    shape, chunks = shard_chunks(leaf, name)
    boxes = [(chunk.offsets, chunk.sizes) for chunk in chunks]
    replicated, grad = bool(getattr(leaf, "replicated", False)), bool(getattr(leaf, "requires_grad", False))
    return position, class_name(type(leaf)), shard_dtype(leaf, name), shape, boxes, replicated, grad
