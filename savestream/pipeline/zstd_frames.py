"""Single zstd frames in caller-owned memory: encoding that may give up, decoding that trusts no header."""

from __future__ import annotations

from collections.abc import Sequence

import zstandard

from savestream.errors import CorruptCheckpointError
from savestream.pipeline.byte_planes import Bytes

__all__ = ["ZstdDecoder", "ZstdEncoder"]

MAXIMUM_WINDOW_BYTES = 8 * 1024 * 1024

_MAGIC = (0xFD2FB528).to_bytes(4, "little")
_LONGEST_HEADER_BYTES = 18
_RLE_BLOCK = 1
_RESERVED_BLOCK = 3


class ZstdEncoder:
    """A compression context tuned for exponent planes; one for each thread."""

    def __init__(self) -> None:
        # Literals entropy-coded, matches found by one small hash table that stays in the first-level cache:
        # three times the speed of level 1 on exponent planes and smaller.
        parameters = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST,
            min_match=7,
            hash_log=6,
            window_log=17,
            target_length=0,
            write_content_size=True,
            write_checksum=False,
            write_dict_id=False,
        )
        self._compressor = zstandard.ZstdCompressor(compression_params=parameters)

    def compress_into(self, source: Bytes, output: Bytes) -> int | None:
        """Encode ``source`` as one frame at the start of ``output``.

        Returns
        -------
        The frame's length, or None where it would not be shorter than ``output`` (whose content is then undefined).
        """
        if not len(output):
            return None
        # size= puts the content size into the header, which the decoder insists on.
        reader = self._compressor.stream_reader(source.data, size=len(source))
        length = reader.readinto(output)
        return length if length < len(output) else None

    def compressed_lengths(self, sources: Sequence[Bytes]) -> list[int]:
        """Length of each source's frame; one release of the interpreter lock for all of them where possible."""
        if "multi_compress_to_buffer" in zstandard.backend_features:
            frames = self._compressor.multi_compress_to_buffer([source.data for source in sources])
            return [len(frames[index]) for index in range(len(sources))]
        return [len(self._compressor.compress(source.data)) for source in sources]


class ZstdDecoder:
    """A decompression context; one for each thread."""

    def __init__(self) -> None:
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=MAXIMUM_WINDOW_BYTES)

    def decompress_exactly(self, frame: Bytes, output: Bytes) -> None:
        """Decode one frame that fills ``output`` exactly and occupies all of ``frame``.

        Memory is bounded by ``output`` and the largest window, whatever the frame claims.

        Raises
        ------
        CorruptCheckpointError
            The frame is malformed, truncated, followed by other data, skippable, needs a dictionary or a window of more
            than 8 MiB, or does not state exactly the length of ``output``.
        """
        try:
            _check_header(frame, len(output))
            # With the whole frame and all room for its content, libzstd decodes in one pass, without a window buffer,
            # and refuses a frame that holds more or less than it states.
            reader = self._decompressor.stream_reader(frame.data, read_across_frames=False)
            length = reader.readinto(output)
        except zstandard.ZstdError as error:
            raise CorruptCheckpointError(f"a zstd frame is damaged: {error}") from error
        if length != len(output):
            raise CorruptCheckpointError(f"a zstd frame does not decode to the expected {len(output)} bytes")


def _check_header(frame: Bytes, expected_length: int) -> None:
    head = frame[:_LONGEST_HEADER_BYTES].tobytes()
    if head[:4] != _MAGIC:  # skippable frames have another magic number
        raise CorruptCheckpointError("a zstd frame does not start with zstd's magic number")
    parameters = zstandard.get_frame_parameters(head)
    if parameters.content_size == zstandard.CONTENTSIZE_UNKNOWN:
        raise CorruptCheckpointError("a zstd frame does not state its content size")
    if parameters.content_size != expected_length:
        raise CorruptCheckpointError(
            f"a zstd frame claims {parameters.content_size} bytes of content where {expected_length} are expected"
        )
    if parameters.window_size > MAXIMUM_WINDOW_BYTES:
        raise CorruptCheckpointError(f"a zstd frame needs a window of {parameters.window_size} bytes, over 8 MiB")
    if parameters.dict_id:
        raise CorruptCheckpointError(f"a zstd frame needs the dictionary {parameters.dict_id}")
    end = _find_end(frame.data, zstandard.frame_header_size(head)) + 4 * parameters.has_checksum
    if end != len(frame):
        raise CorruptCheckpointError(f"a zstd frame ends at byte {end} of {len(frame)}")


def _find_end(frame: memoryview, position: int) -> int:
    """Walk the block headers; python-zstandard does not say where in its source a frame ended."""
    last = False
    while not last:
        if position + 3 > len(frame):
            raise CorruptCheckpointError("a zstd frame is truncated")
        header = int.from_bytes(frame[position : position + 3], "little")
        last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        if kind == _RESERVED_BLOCK:
            raise CorruptCheckpointError("a zstd frame holds a block of an unknown kind")
        position += 3 + (1 if kind == _RLE_BLOCK else size)
    return position
