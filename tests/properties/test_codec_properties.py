"""Every frame comes back bit by bit, whatever its bytes, element size, length and alignment."""

from __future__ import annotations

import contextlib

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from savestream.errors import CorruptCheckpointError
from savestream.pipeline.codecs import CODECS, RAW, FrameDecoder, FrameEncoder, digest, worst_case_bytes

ITEM_SIZES = (1, 2, 3, 4, 8, 12, 16, 32)


@st.composite
def frames(draw: st.DrawFn) -> np.ndarray:
    """Bytes from constant to random, plane by plane, at any alignment and of any length."""
    period = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    length = draw(st.one_of(st.integers(0, 300), st.integers(0, 5000), st.sampled_from([262_144, 600_001])))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = np.empty(-(-length // period) * period, np.uint8).reshape(-1, period)
    for column in range(period):
        alphabet = draw(st.sampled_from([1, 2, 17, 256]))
        values[:, column] = random.integers(0, alphabet, len(values), np.uint8, endpoint=False)
    for _ in range(draw(st.integers(0, 2))):  # a run that samples may miss
        start = draw(st.integers(0, len(values)))
        values[start : start + draw(st.integers(0, 20_000))] = draw(st.integers(0, 255))
    offset = draw(st.integers(0, 7))
    placed = np.empty(offset + length, np.uint8)
    placed[offset:] = values.reshape(-1)[:length]
    return placed[offset:]


@settings(deadline=None, max_examples=150)
@given(source=frames(), itemsize=st.sampled_from(ITEM_SIZES), planar=st.booleans(), offset=st.integers(0, 7))
@example(source=np.empty(0, np.uint8), itemsize=4, planar=True, offset=0)
@example(source=np.zeros(1, np.uint8), itemsize=1, planar=True, offset=0)
@example(source=np.zeros(8, np.uint8), itemsize=8, planar=True, offset=3)
def test_round_trip(source: np.ndarray, itemsize: int, planar: bool, offset: int) -> None:
    raw_length, original = len(source), source.tobytes()
    output = np.full(worst_case_bytes(raw_length) + 16, 0xA5, np.uint8)
    frame = FrameEncoder().encode(source, itemsize, planar, output[: worst_case_bytes(raw_length)])

    assert source.tobytes() == original
    assert output[worst_case_bytes(raw_length) :].tobytes() == b"\xa5" * 16
    assert frame.stored_length <= worst_case_bytes(raw_length)
    assert (frame.codec == RAW) == (frame.stored_length == raw_length) == (frame.stored_digest == frame.raw_digest)
    stored = output[: frame.stored_length]
    assert (frame.stored_digest, frame.raw_digest) == (digest(stored), digest(source))

    restored = np.full(offset + raw_length + 16, 0x5A, np.uint8)
    target = restored[offset : offset + raw_length]
    stored.flags.writeable = False
    FrameDecoder().decode_checked(
        stored, frame.codec, itemsize, raw_length, target, frame.stored_digest, frame.raw_digest
    )
    assert target.tobytes() == original
    assert restored[:offset].tobytes() + restored[offset + raw_length :].tobytes() == b"\x5a" * (offset + 16)


@settings(deadline=None, max_examples=300)
@given(
    stored=st.binary(max_size=200),
    prefix=st.sampled_from([b"", b"\x28\xb5\x2f\xfd", b"\x28\xb5\x2f\xfd\x60\x00\x00", b"\1\2\0\0\4\0\0\0"]),
    codec=st.integers(0, len(CODECS)),
    itemsize=st.sampled_from(ITEM_SIZES),
    raw_length=st.integers(0, 300),
)
def test_arbitrary_bytes_raise_the_typed_error_or_decode(
    stored: bytes, prefix: bytes, codec: int, itemsize: int, raw_length: int
) -> None:
    data = np.frombuffer(prefix + stored, np.uint8)
    guarded = np.full(raw_length + 16, 0xA5, np.uint8)
    with contextlib.suppress(CorruptCheckpointError):
        FrameDecoder().decode(data, codec, itemsize, raw_length, guarded[:raw_length])
    assert guarded[raw_length:].tobytes() == b"\xa5" * 16
