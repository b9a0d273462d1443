"""Codecs of frames: raw, zstd, byte planes + zstd; and the digest of stored and raw bytes.

A frame is stored in one of three ways. ``raw``: its bytes. ``zstd``: one zstd frame. ``planes-zstd``, for numeric
elements of W = 2, 4 or 8 bytes (16-byte elements count as pairs of 8), with N = raw_length // W:

==================  ===========================================================================================
W bytes             the mode of each plane: 0 raw, 1 zstd, 2 constant
W x u32             little-endian: the stored length L of each plane
sum of L bytes      the planes, one after the other; plane k is byte k of every element, in memory order.
                    Raw: its N bytes (L = N). Zstd: one zstd frame of N bytes of content. Constant: the one
                    byte that all N are equal to (L = 1)
raw_length % W      the bytes after the last whole element, verbatim
==================  ===========================================================================================

Nothing follows. Every zstd frame states its content size, needs no dictionary and a window of at most 8 MiB. A frame
that does not shrink by 3 percent is stored raw, so no frame is longer stored than raw.
"""

from __future__ import annotations

import msgspec
import numpy as np
import xxhash

from savestream.errors import CorruptCheckpointError
from savestream.pipeline.byte_planes import Bytes, PlaneMerger, extract_plane, gather_samples, plane_width
from savestream.pipeline.zstd_frames import ZstdDecoder, ZstdEncoder

__all__ = [
    "CODECS",
    "PLANES_ZSTD",
    "RAW",
    "ZSTD",
    "EncodedFrame",
    "FrameDecoder",
    "FrameEncoder",
    "digest",
    "worst_case_bytes",
]

CODECS = ("raw", "zstd", "planes-zstd")
RAW, ZSTD, PLANES_ZSTD = 0, 1, 2

_PLANE_RAW, _PLANE_ZSTD, _PLANE_CONSTANT = 0, 1, 2

# xxhash keeps the interpreter lock for inputs up to this size. A single call over a whole frame releases it, and
# beside a busy Python thread takes 5 ms (a switch interval) to get it back: sixty times what hashing costs.
_DIGEST_PIECE_BYTES = 64 * 1024

_LARGEST_WORTHWHILE_PERCENT = 97
_LARGEST_SAMPLE_PERCENT = 90


def digest(data: memoryview | Bytes) -> bytes:
    """XXH3-128 in canonical (big-endian) form, 16 bytes; detects accidents, not attackers.

    ``data`` is contiguous: a byte view or a one-dimensional uint8 array.
    """
    view = data.data if isinstance(data, np.ndarray) else data
    state = xxhash.xxh3_128()
    for start in range(0, len(view), _DIGEST_PIECE_BYTES):
        state.update(view[start : start + _DIGEST_PIECE_BYTES])
    return state.digest()


def worst_case_bytes(raw_length: int) -> int:
    """Upper bound of ``stored_length``, and the room that encoding needs; raw storage is the fallback."""
    return raw_length


class EncodedFrame(msgspec.Struct, frozen=True, gc=False):
    """How one frame was stored; the two digests are equal where the codec is raw."""

    codec: int
    stored_length: int
    stored_digest: bytes
    raw_digest: bytes


class FrameEncoder:
    """Encodes frames; owns a zstd context and scratch memory of one plane. Not thread-safe: one for each thread.

    The result depends on the frame alone, not on what was encoded before.
    """

    def __init__(self) -> None:
        self._zstd = ZstdEncoder()
        self._plane = np.empty(0, np.uint8)

    def encode(self, source: Bytes, itemsize: int, planar: bool, output: Bytes) -> EncodedFrame:
        """Store ``source`` in ``output[:stored_length]``.

        Parameters
        ----------
        source
            The frame: one-dimensional, contiguous, at any alignment.
        itemsize
            Bytes of an element.
        planar
            Whether elements are numbers, of either byte order. Other data is plain zstd.
        output
            At least ``worst_case_bytes(len(source))`` long, not overlapping ``source``. What follows the stored bytes
            is undefined.

        Raises
        ------
        ValueError
            ``output`` is too short.
        """
        raw_length = len(source)
        if len(output) < worst_case_bytes(raw_length):
            raise ValueError(f"{len(output)} bytes of output for a frame of {raw_length}")
        raw_digest = digest(source)
        room = output[: raw_length * _LARGEST_WORTHWHILE_PERCENT // 100]
        width = plane_width(itemsize, raw_length) if planar else 0
        codec = PLANES_ZSTD if width else ZSTD
        length = self._encode_planes(source, width, room) if width else self._zstd.compress_into(source, room)
        if length is None:
            np.copyto(output[:raw_length], source)
            return EncodedFrame(RAW, raw_length, raw_digest, raw_digest)
        return EncodedFrame(codec, length, digest(output[:length]), raw_digest)

    def _encode_planes(self, source: Bytes, width: int, room: Bytes) -> int | None:
        modes = self._choose_modes(source, width)
        if all(mode == _PLANE_RAW for mode in modes):
            return None
        end = _header_bytes(width)
        if end > len(room):
            return None
        lengths = []
        for plane in range(width):
            modes[plane], length = self._encode_plane(source, width, plane, modes[plane], room[end:])
            if length is None:
                return None
            lengths.append(length)
            end += length
        tail = source[len(source) - len(source) % width :]
        if end + len(tail) > len(room):
            return None
        room[end : end + len(tail)] = tail
        room[:width] = modes
        room[width : _header_bytes(width)] = np.array(lengths, "<u4").view(np.uint8)
        return end + len(tail)

    def _choose_modes(self, source: Bytes, width: int) -> list[int]:
        """The mode each plane seems to deserve. Frames too small to sample try every plane in full."""
        samples = gather_samples(source, width)
        if samples is None:
            return [_PLANE_ZSTD] * width
        lengths = self._zstd.compressed_lengths(list(samples))
        largest = samples.shape[1] * _LARGEST_SAMPLE_PERCENT // 100
        return [_PLANE_ZSTD if length <= largest else _PLANE_RAW for length in lengths]

    def _encode_plane(self, source: Bytes, width: int, plane: int, mode: int, room: Bytes) -> tuple[int, int | None]:
        """Store one plane; returns mode and length, which is None where ``room`` does not suffice."""
        count = len(source) // width
        if mode == _PLANE_RAW:
            if count > len(room):
                return mode, None
            extract_plane(source, width, plane, room[:count])
            return mode, count
        if len(self._plane) < count:
            self._plane = np.empty(count, np.uint8)
        scratch = self._plane[:count]
        extract_plane(source, width, plane, scratch)
        if len(room) and _is_constant(scratch):
            room[0] = scratch[0]
            return _PLANE_CONSTANT, 1
        length = self._zstd.compress_into(scratch, room[:count])
        if length is not None:
            return _PLANE_ZSTD, length
        if count > len(room):
            return mode, None
        room[:count] = scratch
        return _PLANE_RAW, count


class FrameDecoder:
    """Decodes frames; owns a zstd context and scratch memory below twice the frame's. One for each thread."""

    def __init__(self) -> None:
        self._zstd = ZstdDecoder()
        self._merger = PlaneMerger()

    def decode_checked(
        self,
        stored: Bytes,
        codec: int,
        itemsize: int,
        raw_length: int,
        output: Bytes,
        stored_digest: bytes,
        raw_digest: bytes,
    ) -> None:
        """Like :meth:`decode`, with both digests: of ``stored`` before decoding, of ``output`` after it.

        Raises
        ------
        CorruptCheckpointError
            As for :meth:`decode`, and where a digest differs. A difference of the stored bytes leaves ``output`` alone.
        """
        if digest(stored) != stored_digest:
            raise CorruptCheckpointError("the stored bytes differ from those that were written (XXH3-128)")
        self.decode(stored, codec, itemsize, raw_length, output)
        found = stored_digest if codec == RAW else digest(output)
        if found != raw_digest:
            raise CorruptCheckpointError("the decoded bytes differ from those that were saved (XXH3-128)")

    def decode(self, stored: Bytes, codec: int, itemsize: int, raw_length: int, output: Bytes) -> None:
        """Restore a frame.

        Parameters
        ----------
        stored
            The stored bytes, exactly; one-dimensional and contiguous.
        codec
            Index in ``CODECS``.
        itemsize
            Bytes of an element, as given to the encoder; matters for ``planes-zstd`` only.
        output
            Exactly ``raw_length`` bytes, contiguous. After an error its content is undefined.

        Raises
        ------
        CorruptCheckpointError
            ``stored`` is not what an encoder writes for a frame of that length. The caller adds object and keys.
        ValueError
            ``output`` is not ``raw_length`` long.
        """
        if len(output) != raw_length:
            raise ValueError(f"{len(output)} bytes of output for a frame of {raw_length}")
        if codec == RAW:
            if len(stored) != raw_length:
                raise CorruptCheckpointError(f"a raw frame of {raw_length} bytes is stored in {len(stored)}")
            np.copyto(output, stored)
        elif codec == ZSTD:
            self._zstd.decompress_exactly(stored, output)
        elif codec == PLANES_ZSTD:
            self._decode_planes(stored, itemsize, output)
        else:
            raise CorruptCheckpointError(f"codec number {codec} is none of {', '.join(CODECS)}")

    def _decode_planes(self, stored: Bytes, itemsize: int, output: Bytes) -> None:
        width = plane_width(itemsize, len(output))
        if not width:
            raise CorruptCheckpointError(f"byte planes for a frame of {len(output)} bytes, {itemsize} an element")
        count = len(output) // width
        tail_bytes = len(output) - count * width
        modes, lengths = _read_plane_header(stored, width, count, tail_bytes)
        starts = [_header_bytes(width) + sum(lengths[:plane]) for plane in range(width)]

        def read_plane(plane: int, slot: int) -> Bytes:
            content = stored[starts[plane] : starts[plane] + lengths[plane]]
            if modes[plane] == _PLANE_RAW:
                return content
            if modes[plane] == _PLANE_CONSTANT:
                return np.broadcast_to(content[0], (count,))
            scratch = self._merger.scratch(1, slot, count)
            self._zstd.decompress_exactly(content, scratch)
            return scratch

        self._merger.merge(read_plane, width, output[: count * width])
        output[count * width :] = stored[len(stored) - tail_bytes :]


def _is_constant(plane: Bytes) -> bool:
    # The first bytes settle nearly every case without a pass over the plane.
    if plane[0] != plane[len(plane) // 2] or plane[0] != plane[-1]:
        return False
    return bool(plane.min() == plane.max())


def _header_bytes(width: int) -> int:
    return width * 5


def _read_plane_header(stored: Bytes, width: int, count: int, tail_bytes: int) -> tuple[list[int], list[int]]:
    header = _header_bytes(width)
    if len(stored) < header:
        raise CorruptCheckpointError(f"a frame of byte planes is truncated to {len(stored)} bytes")
    modes = [int(mode) for mode in stored[:width]]
    lengths = [int(length) for length in np.frombuffer(stored[width:header].tobytes(), "<u4")]
    for plane, (mode, length) in enumerate(zip(modes, lengths, strict=True)):
        if mode not in (_PLANE_RAW, _PLANE_ZSTD, _PLANE_CONSTANT):
            raise CorruptCheckpointError(f"byte plane {plane} has the unknown mode {mode}")
        expected = {_PLANE_RAW: count, _PLANE_CONSTANT: 1}.get(mode, length)
        if length != expected:
            raise CorruptCheckpointError(f"byte plane {plane} is stored in {length} bytes instead of {expected}")
    total = header + sum(lengths) + tail_bytes
    if total != len(stored):
        raise CorruptCheckpointError(f"the byte planes add up to {total} bytes, {len(stored)} are stored")
    return modes, lengths
