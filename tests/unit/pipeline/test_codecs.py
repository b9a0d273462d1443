"""Frames that are hostile, damaged or merely typical; sizes as they were measured on real weights."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
import xxhash
import zstandard

from savestream.errors import CorruptCheckpointError
from savestream.pipeline import zstd_frames
from savestream.pipeline.codecs import (
    CODECS,
    PLANES_ZSTD,
    RAW,
    ZSTD,
    EncodedFrame,
    FrameDecoder,
    FrameEncoder,
    digest,
    worst_case_bytes,
)

FRAME_BYTES = 4 * 1024 * 1024


def raw_bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def store(array: np.ndarray, *, planar: bool = True) -> tuple[EncodedFrame, np.ndarray]:
    source = raw_bytes(array)
    output = np.empty(worst_case_bytes(len(source)), np.uint8)
    frame = FrameEncoder().encode(source, array.dtype.itemsize, planar, output)
    return frame, output[: frame.stored_length].copy()


def decode(stored: bytes | np.ndarray, codec: int, itemsize: int, raw_length: int) -> bytes:
    output = np.full(raw_length, 0xA5, np.uint8)
    FrameDecoder().decode(np.frombuffer(stored, np.uint8), codec, itemsize, raw_length, output)
    return output.tobytes()


def weights(count: int) -> np.ndarray:
    return np.random.default_rng(3).normal(0, 0.02, count).astype(np.float32)


def zstd(data: bytes, **options: object) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


# What shrinks, and by how much


@pytest.mark.parametrize(
    ("array", "smallest", "largest"),
    [
        pytest.param(weights(FRAME_BYTES // 4), 0.80, 0.86, id="float32"),
        pytest.param(weights(FRAME_BYTES // 4).astype(">f4"), 0.80, 0.86, id="float32 big-endian"),
        pytest.param(weights(FRAME_BYTES // 2).astype(ml_dtypes.bfloat16), 0.64, 0.70, id="bfloat16"),
        pytest.param(weights(FRAME_BYTES // 2).astype(np.float16), 0.81, 0.88, id="float16"),
        pytest.param(
            weights(FRAME_BYTES // 4).astype(ml_dtypes.bfloat16).astype(np.float32), 0.31, 0.36, id="upcast bfloat16"
        ),
        pytest.param(np.arange(FRAME_BYTES // 8), 0.0, 0.30, id="int64 counter"),
        pytest.param(np.zeros(FRAME_BYTES // 4, np.float32), 0.0, 24 / FRAME_BYTES, id="zeros"),
    ],
)
def test_numeric_frames_shrink_as_measured(array: np.ndarray, smallest: float, largest: float) -> None:
    frame, stored = store(array)
    assert CODECS[frame.codec] == "planes-zstd"
    assert smallest <= frame.stored_length / FRAME_BYTES <= largest
    assert decode(stored, frame.codec, array.dtype.itemsize, FRAME_BYTES) == array.tobytes()


def test_text_is_plain_zstd() -> None:
    text = np.frombuffer(b"the quick brown fox jumps over the lazy dog; " * 2000, np.uint8)
    frame, stored = store(text, planar=False)
    assert (frame.codec, frame.stored_length < len(text) // 10) == (ZSTD, True)
    assert zstandard.ZstdDecompressor().decompress(stored.tobytes()) == text.tobytes()


@pytest.mark.parametrize("itemsize", [1, 4])
def test_incompressible_frame_is_stored_raw_with_one_digest(itemsize: int) -> None:
    noise = np.random.default_rng(5).integers(0, 256, FRAME_BYTES, np.uint8).view(f"u{itemsize}")
    frame, stored = store(noise)
    assert frame == EncodedFrame(RAW, FRAME_BYTES, frame.raw_digest, frame.raw_digest)
    assert stored.tobytes() == noise.tobytes()


def test_frame_that_shrinks_by_less_than_three_percent_is_stored_raw() -> None:
    noise = np.random.default_rng(5).integers(0, 256, 100_000, np.uint8)
    noise[:2000] = 0
    assert store(noise, planar=False)[0].codec == RAW
    noise[:4000] = 0
    assert store(noise, planar=False)[0].codec == ZSTD


def test_plane_that_does_not_shrink_is_stored_raw_inside_the_frame() -> None:
    words = np.random.default_rng(5).integers(0, 1 << 32, 10_000, np.uint32)  # too few to sample: every plane is tried
    words.view(np.uint8)[3::4] = 7
    frame, stored = store(words)
    assert (frame.codec, stored[:4].tolist()) == (PLANES_ZSTD, [0, 0, 0, 2])
    assert decode(stored, PLANES_ZSTD, 4, words.nbytes) == words.tobytes()


def test_payload_reads_as_documented() -> None:
    """The module's table, followed with struct, numpy and zstandard alone."""
    array = weights(10_001).astype(ml_dtypes.bfloat16).astype(np.float32)
    source = np.concatenate([raw_bytes(array), np.array([1, 2, 3], np.uint8)])
    output = np.empty(len(source), np.uint8)
    frame = FrameEncoder().encode(source, 4, True, output)
    payload = output[: frame.stored_length].tobytes()
    modes, lengths = payload[:4], struct.unpack("<4I", payload[4:20])
    assert list(modes) == [2, 2, 0, 1]
    planes, position = np.empty((10_001, 4), np.uint8), 20
    for plane, (mode, length) in enumerate(zip(modes, lengths, strict=True)):
        content = payload[position : position + length]
        position += length
        if mode == 1:
            content = zstandard.ZstdDecompressor().decompress(content)
        planes[:, plane] = np.frombuffer(content, np.uint8)
    assert planes.tobytes() + payload[position:] == source.tobytes()


def test_frame_does_not_depend_on_what_was_encoded_before() -> None:
    encoder = FrameEncoder()
    first, second = raw_bytes(weights(200_000)), raw_bytes(np.arange(50_000))
    outputs = [np.zeros(len(first), np.uint8) for _ in range(3)]
    results = [encoder.encode(first, 4, True, outputs[0]), encoder.encode(second, 8, True, outputs[1])]
    results.append(encoder.encode(first, 4, True, outputs[2]))
    length = results[0].stored_length
    assert results[0] == results[2]
    assert outputs[0][:length].tobytes() == outputs[2][:length].tobytes()


def test_backend_without_batches_samples_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    batched = store(weights(FRAME_BYTES // 4))[0]
    monkeypatch.setattr(zstd_frames.zstandard, "backend_features", frozenset())
    assert store(weights(FRAME_BYTES // 4))[0] == batched


def test_output_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="9 bytes of output for a frame of 10"):
        FrameEncoder().encode(np.zeros(10, np.uint8), 1, False, np.zeros(9, np.uint8))
    with pytest.raises(ValueError, match="9 bytes of output for a frame of 10"):
        FrameDecoder().decode(np.zeros(10, np.uint8), RAW, 1, 10, np.zeros(9, np.uint8))


def test_four_threads_encode_and_decode_as_one() -> None:
    arrays = [weights(300_000), np.arange(100_000), weights(300_000).astype(np.float16), np.zeros(9, np.uint8)]
    expected = [store(array) for array in arrays]
    together, problems = threading.Barrier(4), []

    def work() -> None:
        encoder, decoder, output = FrameEncoder(), FrameDecoder(), np.empty(1_200_000, np.uint8)
        together.wait()
        for _ in range(5):
            for array, (frame, _) in zip(arrays, expected, strict=True):
                found = encoder.encode(raw_bytes(array), array.dtype.itemsize, True, output)
                restored = np.empty(array.nbytes, np.uint8)
                decoder.decode_checked(
                    output[: found.stored_length],
                    found.codec,
                    array.dtype.itemsize,
                    array.nbytes,
                    restored,
                    frame.stored_digest,
                    frame.raw_digest,
                )
                if found != frame or restored.tobytes() != array.tobytes():
                    problems.append((found, frame))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


# Digests


@pytest.mark.parametrize("length", [0, 1, 65_535, 65_536, 65_537, 300_000])
def test_digest_is_plain_xxh3_128(length: int) -> None:
    data = np.random.default_rng(length).integers(0, 256, length, np.uint8)
    expected = xxhash.xxh3_128_digest(data.tobytes())
    assert digest(data) == digest(memoryview(data.tobytes())) == expected
    assert int.from_bytes(expected, "big") == xxhash.xxh3_128_intdigest(data.tobytes())


# Damage and malice


def test_every_single_bit_flip_is_noticed() -> None:
    array = weights(200).astype(ml_dtypes.bfloat16).astype(np.float32)
    frame, stored = store(array)
    assert frame.codec == PLANES_ZSTD
    assert set(stored[:4].tolist()) == {0, 1, 2}
    decoder, output = FrameDecoder(), np.empty(array.nbytes, np.uint8)
    harmless = 0
    for bit in range(len(stored) * 8):
        damaged = stored.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        arguments = (damaged, frame.codec, 4, array.nbytes, output)
        with pytest.raises(CorruptCheckpointError, match="stored bytes differ"):
            decoder.decode_checked(*arguments, frame.stored_digest, frame.raw_digest)
        try:  # someone who forged the stored digest too
            decoder.decode_checked(*arguments, digest(damaged), frame.raw_digest)
        except CorruptCheckpointError:
            continue
        harmless += 1  # a reserved or redundant bit of zstd's own
        assert output.tobytes() == array.tobytes()
    assert harmless < 16


def test_every_truncation_and_extension_is_refused() -> None:
    array = weights(200)
    frame, stored = store(array)
    for length in range(len(stored)):
        with pytest.raises(CorruptCheckpointError):
            decode(stored[:length], frame.codec, 4, array.nbytes)
    with pytest.raises(CorruptCheckpointError, match="add up to"):
        decode(stored.tobytes() + b"\0", frame.codec, 4, array.nbytes)
    plain = zstd(array.tobytes())
    for length in range(len(plain)):
        with pytest.raises(CorruptCheckpointError):
            decode(plain[:length], ZSTD, 4, array.nbytes)


CONTENT = b"0123456789abcdef" * 64
SKIPPABLE = struct.pack("<II", 0x184D2A50, 4) + b"skip"
HUGE_CLAIM = struct.pack("<IBQ", 0xFD2FB528, 0xE0, 1 << 60) + b"\x01\x00\x00"


def frame_of_runs(*lengths: int) -> bytes:
    """A frame that states 1024 bytes of content, made of run-length blocks."""
    last = len(lengths) - 1
    blocks = [struct.pack("<I", length << 3 | 2 | (index == last))[:3] + b"x" for index, length in enumerate(lengths)]
    return struct.pack("<IBH", 0xFD2FB528, 0x60, 1024 - 256) + b"".join(blocks)


def test_frame_of_runs_is_well_formed() -> None:
    assert decode(frame_of_runs(1000, 24), ZSTD, 1, 1024) == b"x" * 1024


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        pytest.param(b"", "magic number", id="empty"),
        pytest.param(b"not zstd at all, not at all", "magic number", id="no zstd"),
        pytest.param(HUGE_CLAIM, f"claims {1 << 60} bytes", id="claims 2^60"),
        pytest.param(zstd(CONTENT, write_content_size=False), "does not state its content size", id="no size"),
        pytest.param(zstd(CONTENT) * 2, "ends at byte", id="two frames"),
        pytest.param(zstd(CONTENT[:512]) * 2, "claims 512 bytes", id="two half frames"),
        pytest.param(zstd(CONTENT) + zstd(b""), "ends at byte", id="empty second frame"),
        pytest.param(zstd(CONTENT) + SKIPPABLE, "ends at byte", id="skippable frame behind"),
        pytest.param(SKIPPABLE + zstd(CONTENT), "magic number", id="skippable frame in front"),
        pytest.param(zstd(CONTENT) + b"\0", "ends at byte", id="trailing byte"),
        pytest.param(frame_of_runs(1024, 1024), "damaged", id="holds more than it states"),
        pytest.param(frame_of_runs(1024, 1), "damaged", id="holds one byte more than it states"),
        pytest.param(frame_of_runs(1000), "damaged", id="holds less than it states"),
        pytest.param(
            zstd(CONTENT, dict_data=zstandard.ZstdCompressionDict(CONTENT[:256] * 2)),
            "damaged",
            id="nameless dictionary",
        ),
    ],
)
def test_hostile_zstd_frame_is_refused(stored: bytes, problem: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=problem):
        decode(stored, ZSTD, 1, len(CONTENT))
    # and as a plane of two-byte elements, behind a raw plane
    payload = b"\0\1" + struct.pack("<II", len(CONTENT), len(stored)) + CONTENT + stored
    with pytest.raises(CorruptCheckpointError, match=problem):
        decode(payload, PLANES_ZSTD, 2, 2 * len(CONTENT))


def test_frame_that_names_a_dictionary_is_refused() -> None:
    samples = [f"sample {number} of a dictionary".encode() * 8 for number in range(200)]
    trained = zstandard.train_dictionary(1024, samples)
    with pytest.raises(CorruptCheckpointError, match=f"dictionary {trained.dict_id()}"):
        decode(zstd(CONTENT, dict_data=trained), ZSTD, 1, len(CONTENT))


def test_window_over_eight_mebibytes_is_refused() -> None:
    length = 17 * 1024 * 1024
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=24)
    with pytest.raises(CorruptCheckpointError, match="window of 16777216 bytes"):
        decode(zstd(bytes(length), compression_params=parameters), ZSTD, 1, length)


@pytest.mark.parametrize(
    ("stored", "codec", "itemsize", "raw_length", "problem"),
    [
        (b"abc", RAW, 1, 4, "a raw frame of 4 bytes is stored in 3"),
        (b"abcd", 3, 1, 4, "codec number 3 is none of raw, zstd, planes-zstd"),
        (b"abcd", -1, 1, 4, "codec number -1"),
        (b"\0" * 40, PLANES_ZSTD, 3, 30, "byte planes for a frame of 30 bytes, 3 an element"),
        (b"\0" * 40, PLANES_ZSTD, 4, 3, "byte planes for a frame of 3 bytes"),
        (b"\0" * 9, PLANES_ZSTD, 2, 8, "truncated to 9 bytes"),
        (b"\0\3" + struct.pack("<II", 4, 4) + b"\0" * 8, PLANES_ZSTD, 2, 8, "unknown mode 3"),
        (b"\0\0" + struct.pack("<II", 4, 5) + b"\0" * 9, PLANES_ZSTD, 2, 8, "5 bytes instead of 4"),
        (b"\0\2" + struct.pack("<II", 4, 2) + b"\0" * 6, PLANES_ZSTD, 2, 8, "2 bytes instead of 1"),
        (b"\0\1" + struct.pack("<II", 4, 0xFFFFFFFF) + b"\0" * 6, PLANES_ZSTD, 2, 8, "add up to 4294967309"),
        (b"\0\0" + struct.pack("<II", 4, 4) + b"\0" * 8, PLANES_ZSTD, 2, 9, "add up to 19 bytes, 18 are stored"),
    ],
)
def test_malformed_frame_is_refused(stored: bytes, codec: int, itemsize: int, raw_length: int, problem: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=problem):
        decode(stored, codec, itemsize, raw_length)


def test_raw_frame_whose_digests_disagree_is_refused() -> None:
    stored, output = np.arange(10, dtype=np.uint8), np.empty(10, np.uint8)
    with pytest.raises(CorruptCheckpointError, match="decoded bytes differ"):
        FrameDecoder().decode_checked(stored, RAW, 1, 10, output, digest(stored), bytes(16))


def test_decoder_works_on_after_an_error() -> None:
    decoder, encoder = FrameDecoder(), FrameEncoder()
    array = weights(100_000)
    stored = np.empty(array.nbytes, np.uint8)
    frame = encoder.encode(raw_bytes(array), 4, True, stored)
    stored, output = stored[: frame.stored_length], np.empty(array.nbytes, np.uint8)
    damaged = stored.copy()
    damaged[-1000:] ^= 0xFF
    with pytest.raises(CorruptCheckpointError):
        decoder.decode(damaged, frame.codec, 4, array.nbytes, output)
    decoder.decode(stored, frame.codec, 4, array.nbytes, output)
    assert output.tobytes() == array.tobytes()


BOMB_SCRIPT = """
import resource
import numpy as np, zstandard
from savestream.errors import CorruptCheckpointError
from savestream.pipeline.codecs import FrameDecoder, PLANES_ZSTD, ZSTD

compressor = zstandard.ZstdCompressor(level=1).compressobj(size=1 << 30)
bomb = b"".join([compressor.compress(bytes(1 << 20)) for _ in range(1024)] + [compressor.flush()])
assert len(bomb) < 200_000, len(bomb)
# The same blocks under a header that states 1 KiB: content size in 4 bytes behind magic, descriptor and window.
descriptor = bomb[4]
assert descriptor >> 6 == 2 and not descriptor & 0x20
liar = bomb[:6] + (1024).to_bytes(4, "little") + bomb[10:]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for frame in (bomb, liar):
    planes = b"\\2\\1" + bytes([1, 0, 0, 0]) + len(frame).to_bytes(4, "little") + b"x" + frame
    for codec, stored in ((ZSTD, frame), (PLANES_ZSTD, planes)):
        raw_length = 1024 if codec == ZSTD else 2048
        try:
            FrameDecoder().decode(np.frombuffer(stored, np.uint8), codec, 2, raw_length, np.empty(raw_length, np.uint8))
        except CorruptCheckpointError as error:
            print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts KiB on Linux only")
def test_bomb_is_refused_in_bounded_memory() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", BOMB_SCRIPT], capture_output=True, text=True, check=True, env=environment
    )
    *problems, growth_kib = result.stdout.splitlines()
    assert len(problems) == 4
    assert problems[:2] == [f"a zstd frame claims {1 << 30} bytes of content where 1024 are expected"] * 2
    assert int(growth_kib) < 32 * 1024
