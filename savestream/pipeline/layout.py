"""Where everything lies before anything is encoded: chunks -> frames -> blocks of a rank's raw stream.

A *frame* is the unit of encoding, digest and partial read: at most 4 MiB, ending on a row of its chunk, and on a page
too where both can be had, so that a reader can read straight into a result's memory. Small chunks of equal element
size share a *packed* frame. A *block* is the unit of staging: whole frames, at page-aligned positions where it pays.
Pure arithmetic; nothing here knows where data comes from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from savestream.pipeline.buffers import PAGE_BYTES, round_up

__all__ = [
    "FRAME_BYTES",
    "PACKED_FRAME_BYTES",
    "SMALL_CHUNK_BYTES",
    "Block",
    "ChunkShape",
    "Layout",
    "PackedPiece",
    "Piece",
    "plan_blocks",
    "plan_layout",
]

FRAME_BYTES = 4 * 1024 * 1024
PACKED_FRAME_BYTES = 1024 * 1024
SMALL_CHUNK_BYTES = 256 * 1024


class ChunkShape(msgspec.Struct, frozen=True, gc=False):
    """A chunk as the layout sees it.

    Attributes
    ----------
    nbytes
        Bytes of the chunk.
    itemsize
        Bytes of an element; frames end between elements.
    row_bytes
        Bytes of one index of the first dimension.
    plane_width
        Bytes of the number that byte planes are taken of; 1 where planes make no sense.
    """

    nbytes: int
    itemsize: int
    row_bytes: int
    plane_width: int


class Layout(msgspec.Struct, frozen=True):
    """Positions in the raw stream.

    Attributes
    ----------
    raw_offsets
        Per chunk, in the caller's order: its first byte in the raw stream.
    order
        Chunks in stream order, without those that are empty.
    frame_lengths, frame_widths
        Per frame: raw bytes, plane width.
    frame_chunks
        Per frame: position in ``order`` of its first chunk, and how many chunks it holds (1 for a part of a chunk).
    """

    raw_offsets: npt.NDArray[np.int64]
    order: npt.NDArray[np.int64]
    frame_lengths: npt.NDArray[np.int64]
    frame_widths: npt.NDArray[np.int64]
    frame_chunks: npt.NDArray[np.int64]
    raw_bytes: int


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Bytes ``start:stop`` of one chunk, at ``position`` of the block's buffer."""

    chunk: int
    start: int
    stop: int
    position: int


class PackedPiece(msgspec.Struct, frozen=True, gc=False):
    """The whole chunks ``order[first:last]``, one after the other, at ``position`` of the block's buffer."""

    first: int
    last: int
    position: int
    nbytes: int


class Block(msgspec.Struct, frozen=True):
    """Frames ``first_frame:last_frame`` in one buffer of ``buffer_bytes``; ``positions`` says where each begins."""

    first_frame: int
    last_frame: int
    positions: tuple[int, ...]
    pieces: tuple[Piece | PackedPiece, ...]
    raw_bytes: int
    buffer_bytes: int


def plan_layout(chunks: Sequence[ChunkShape]) -> Layout:
    """Assign each chunk its place in the raw stream and cut the stream into frames."""
    large, small = _split_by_size(chunks)
    order: list[int] = []
    lengths: list[int] = []
    widths: list[int] = []
    members: list[tuple[int, int]] = []
    for index in large:
        for length in _frame_lengths(chunks[index]):
            lengths.append(length)
            widths.append(chunks[index].plane_width)
            members.append((len(order), 1))
        order.append(index)
    for group in small:
        for frame in _packed_frames(chunks, group):
            lengths.append(sum(chunks[index].nbytes for index in frame))
            widths.append(chunks[frame[0]].plane_width)
            members.append((len(order), len(frame)))
            order.extend(frame)
    return _assemble(chunks, order, lengths, widths, members)


def _assemble(
    chunks: Sequence[ChunkShape],
    order: list[int],
    lengths: list[int],
    widths: list[int],
    members: list[tuple[int, int]],
) -> Layout:
    sizes = np.fromiter((chunks[index].nbytes for index in order), np.int64, len(order))
    raw_offsets = np.zeros(len(chunks), np.int64)
    order_array = np.asarray(order, np.int64)
    raw_offsets[order_array] = np.cumsum(sizes) - sizes
    return Layout(
        raw_offsets=raw_offsets,
        order=order_array,
        frame_lengths=np.asarray(lengths, np.int64),
        frame_widths=np.asarray(widths, np.int64),
        frame_chunks=np.asarray(members, np.int64).reshape(-1, 2),
        raw_bytes=int(sizes.sum()),
    )


def _split_by_size(chunks: Sequence[ChunkShape]) -> tuple[list[int], list[list[int]]]:
    """Large chunks in order, then the small ones grouped by element size and plane width, in order of first use."""
    large: list[int] = []
    groups: dict[tuple[int, int], list[int]] = {}
    for index, chunk in enumerate(chunks):
        if chunk.nbytes > SMALL_CHUNK_BYTES:
            large.append(index)
        elif chunk.nbytes:
            groups.setdefault((chunk.itemsize, chunk.plane_width), []).append(index)
    return large, list(groups.values())


def _packed_frames(chunks: Sequence[ChunkShape], group: Iterable[int]) -> Iterable[list[int]]:
    frame: list[int] = []
    used = 0
    for index in group:
        nbytes = chunks[index].nbytes
        if frame and used + nbytes > PACKED_FRAME_BYTES:
            yield frame
            frame, used = [], 0
        frame.append(index)
        used += nbytes
    if frame:
        yield frame


def _frame_lengths(chunk: ChunkShape) -> Iterable[int]:
    step = _frame_step(chunk)
    whole, rest = divmod(chunk.nbytes, step)
    yield from [step] * whole
    if rest:
        yield rest


def _frame_step(chunk: ChunkShape) -> int:
    """The largest frame that ends on a row (else on an element), and on a page where that is possible too."""
    unit = chunk.row_bytes if chunk.row_bytes <= FRAME_BYTES else chunk.itemsize
    if unit > FRAME_BYTES:
        return unit  # one element larger than a frame, such as a huge record: never split
    both = math.lcm(unit, PAGE_BYTES)
    unit = both if both <= FRAME_BYTES else unit
    return FRAME_BYTES // unit * unit


def plan_blocks(layout: Layout, block_bytes: int) -> list[Block]:
    """Group the frames into blocks of at most ``block_bytes`` (or of one frame that is larger)."""
    blocks: list[Block] = []
    builder = _BlockBuilder(layout)
    for frame in range(len(layout.frame_lengths)):
        if builder.used and builder.position_after(frame) > block_bytes:
            blocks.append(builder.finish(frame))
        builder.add(frame)
    if builder.used:
        blocks.append(builder.finish(len(layout.frame_lengths)))
    return blocks


class _BlockBuilder:
    """Fills one block after the other with frames."""

    def __init__(self, layout: Layout) -> None:
        self._lengths = layout.frame_lengths.tolist()
        self._chunks = layout.frame_chunks.tolist()
        self._order = layout.order.tolist()
        self._chunk_position = 0  # in ``order``, of the chunk that the previous frame belonged to
        self._chunk_bytes = 0  # bytes of that chunk already laid out
        self._start(0)

    def _start(self, first_frame: int) -> None:
        self.used = 0
        self._first_frame = first_frame
        self._raw_bytes = 0
        self._positions: list[int] = []
        self._pieces: list[Piece | PackedPiece] = []

    def _position_of(self, frame: int) -> int:
        first, count = self._chunks[frame]
        continues = count == 1 and first == self._chunk_position and self._chunk_bytes > 0
        large = self._lengths[frame] > SMALL_CHUNK_BYTES
        return self.used if continues or not large else round_up(self.used, PAGE_BYTES)

    def position_after(self, frame: int) -> int:
        """Bytes used if ``frame`` were added."""
        return self._position_of(frame) + int(self._lengths[frame])

    def add(self, frame: int) -> None:
        first, count = self._chunks[frame]
        length = self._lengths[frame]
        position = self._position_of(frame)
        if first != self._chunk_position:
            self._chunk_position, self._chunk_bytes = first, 0
        if count == 1:
            self._add_piece(Piece(self._order[first], self._chunk_bytes, self._chunk_bytes + length, position))
            self._chunk_bytes += length
        else:
            self._pieces.append(PackedPiece(first, first + count, position, length))
        self._positions.append(position)
        self._raw_bytes += length
        self.used = position + length

    def _add_piece(self, piece: Piece) -> None:
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, Piece) and last.chunk == piece.chunk:  # one copy for neighbouring frames of a chunk
            self._pieces[-1] = Piece(last.chunk, last.start, piece.stop, last.position)
        else:
            self._pieces.append(piece)

    def finish(self, next_frame: int) -> Block:
        block = Block(
            first_frame=self._first_frame,
            last_frame=next_frame,
            positions=tuple(self._positions),
            pieces=tuple(self._pieces),
            raw_bytes=self._raw_bytes,
            buffer_bytes=round_up(self.used, PAGE_BYTES),
        )
        self._start(next_frame)
        return block
