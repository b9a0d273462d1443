"""Every dtype in every layout comes back bit by bit, or is refused by name before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from roundtrip_support import assert_same, fresh_place, snapshot, stored_bytes

from savestream import CheckpointInfo, SaveOptions, UnsafeObjectError, blocking
from savestream.storage_backends import MemoryBackend

ALIGNED = np.dtype([("flag", "i1"), ("value", "f8"), ("half", "f2")], align=True)
NESTED = np.dtype(
    [("when", "M8[D]"), ("inner", [("took", "m8[us]"), ("box", ">i2", (2, 3))]), ("tag", "U3"), ("code", "S2")]
)
HOLES = np.dtype({"names": ["a", "b"], "formats": ["<u2", ">f4"], "offsets": [3, 9], "itemsize": 17})
EXTENSION = np.dtype([("weight", ml_dtypes.bfloat16), ("count", "u1")])

ANY_BITS = (
    *(
        f"{order}{code}"
        for code in ("u2", "u4", "u8", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16")
        for order in "<>"
    ),
    *("u1", "i1", "longdouble", "clongdouble", "S1", "S7", "V1", "V3", "V8"),
    *(f"{order}{kind}8[{unit}]" for kind in "mM" for unit in ("D", "s", "25us", "ns", "Y") for order in "<>"),
    *("m8", "M8"),
    *(np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz")),
    *(np.dtype(getattr(ml_dtypes, name)) for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")),
    *(np.dtype(getattr(ml_dtypes, name)) for name in ("float8_e5m2fnuz", "float8_e8m0fnu")),
    *(np.dtype(getattr(ml_dtypes, name)) for name in ("complex32", "bcomplex32")),
    HOLES,
    EXTENSION,
)
SUB_BYTE = ("int4", "uint4", "int2", "uint2", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn")
COUNT = 24


def random_bits(dtype: np.dtype) -> np.ndarray:
    """Any bit patterns: NaN payloads, -0.0, subnormals, NaT, infinities."""
    seed = sum(map(ord, str(dtype)))
    return np.frombuffer(bytearray(np.random.default_rng(seed).bytes(COUNT * dtype.itemsize)), dtype)


def structured(dtype: np.dtype) -> np.ndarray:
    array = np.zeros(COUNT, dtype)
    for name in dtype.names or ():
        field = array[name]
        if field.dtype.names is not None:
            field[...] = structured(field.dtype)
        elif field.dtype.kind in "US":
            field[...] = [f"{number % 5}x" for number in range(COUNT)]
        else:
            field[...] = np.resize(random_bits(field.dtype), field.shape)
    return array


def examples() -> dict[str, np.ndarray]:
    found = {
        str(np.dtype(dtype).str if isinstance(dtype, str) else dtype): random_bits(np.dtype(dtype))
        for dtype in ANY_BITS
    }
    for name in SUB_BYTE:
        found[name] = (np.arange(COUNT) % 4).astype(getattr(ml_dtypes, name))
    found["int4 extremes"] = np.resize(np.array([-8, 7, -1, 0], ml_dtypes.int4), COUNT)
    found["bool"] = np.arange(COUNT) % 3 == 0
    for order in "<>":
        found[f"{order}U5"] = np.array(["", "é", "🧠x", "abcde"] * (COUNT // 4), f"{order}U5")
    found["special f4"] = np.resize(np.array([np.nan, -0.0, np.inf, -np.inf, 1e-45, 3.4e38], "f4"), COUNT)
    found["special complex"] = np.resize(np.array([1 + 2j, complex(np.nan, -0.0), complex(-0.0, np.inf)], "c8"), COUNT)
    found["NaT"] = np.resize(np.array(["2024-02-29", "NaT", "0001-01-01"], "M8[D]"), COUNT)
    found["aligned record"] = structured(ALIGNED)
    found["nested record"] = structured(NESTED)
    found["date and number"] = np.resize(
        np.array([("2020-01-01", 1), ("NaT", -1)], [("t", "M8[D]"), ("n", "i8")]), COUNT
    )
    found["empty items"] = np.zeros(COUNT, "V0")
    return found


EXAMPLES = examples()


def layouts(flat: np.ndarray) -> dict[str, np.ndarray]:
    """The same 24 elements in every layout that numpy has."""
    base = flat.reshape(4, 6)
    read_only = base.copy()
    read_only.flags.writeable = False
    return {
        "contiguous": base,
        "fortran": np.asfortranarray(base),
        "transposed": base.T,
        "permuted": base.reshape(2, 2, 6).transpose(2, 0, 1),
        "columns": base[:, ::2],
        "rows and columns": base[1::2, 1::3],
        "one column": base[:, 1],
        "reversed": base[::-1, ::-1],
        "reversed rows": base[::-1],
        "broadcast": np.broadcast_to(base[0], (3, 6)),
        "broadcast element": np.broadcast_to(base[2, 3, ...], (2, 3)),
        "0-d": base[1, 2, ...],
        "empty": base[:0],
        "empty columns": base[:, :0],
        "one element": base[2:3, 4:5],
        "new axes": base[:, None, :, None],
        "inner view": base[1:3, 2:5],
        "read-only": read_only,
    }


def poisoned(array: np.ndarray, *, order: str) -> np.ndarray:
    """A target of the same dtype and shape whose every byte differs from zero."""
    target = np.empty(array.shape, array.dtype, order=order)  # type: ignore[call-overload]
    if array.dtype.itemsize:
        fill = b"\1" if array.dtype.kind in "bU" or array.dtype.names else b"\xa5"
        if array.dtype.kind != "U":
            target.reshape(-1, order="A").view(np.uint8)[...] = ord(fill)
        else:
            target[...] = "#"
    return target


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("names", [list(EXAMPLES)[start::8] for start in range(8)], ids=" ".join)
def test_every_dtype_in_every_layout(names: list[str], compression: Any) -> None:
    state = {f"{name}, {layout}": array for name in names for layout, array in layouts(EXAMPLES[name]).items()}
    place = fresh_place()
    blocking.save(state, place, options=SaveOptions(compression=compression))

    assert_same(blocking.load(place), state)

    for order in "CF":
        target = {key: poisoned(array, order=order) for key, array in state.items()}
        arrays = dict(target)
        assert blocking.load(place, target) is target
        assert all(target[key] is arrays[key] for key in target)
        assert_same(target, state)


@pytest.mark.parametrize("name", ["<f4", ">u4", "bfloat16", "aligned record", "nested record", "bool", "<U5", "|S7"])
def test_targets_of_any_layout_are_filled(name: str) -> None:
    state = {key: array for key, array in layouts(EXAMPLES[name]).items() if "broadcast" not in key}
    place = fresh_place()
    blocking.save(state, place)
    for number in range(3):
        target = {key: odd_target(array, number) for key, array in state.items()}
        blocking.load(place, target)
        assert_same(target, state)


def odd_target(array: np.ndarray, number: int) -> np.ndarray:
    """An array like ``array`` that is transposed, strided or reversed in memory."""
    if number == 0:
        return np.zeros(array.shape[::-1], array.dtype).T
    if number == 1:
        return np.zeros([2 * size for size in array.shape], array.dtype)[(slice(None, None, 2),) * array.ndim + (...,)]
    return np.zeros(array.shape, array.dtype)[(slice(None, None, -1),) * array.ndim + (...,)]


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_arrays_of_several_frames_in_every_layout(compression: Any, tmp_path: Path) -> None:
    base = (np.arange(1801 * 1500, dtype=np.uint32) * 2654435761 % 65521).reshape(1801, 1500)
    state = {
        "contiguous": base,
        "transposed": base.T,
        "strided": base[:, ::3],
        "reversed": base[::-1, ::-1],
        "long rows": base.reshape(1, -1),
        "broadcast": np.broadcast_to(base[0, :1201], (900, 1201)),
        "big-endian": base.astype(">u4")[5:, 7:],
        "records": base.view([("low", "u2"), ("high", "<u2")]).T,
    }
    blocking.save(state, tmp_path / "c", options=SaveOptions(compression=compression))
    assert_same(blocking.load(tmp_path / "c"), state)
    target = {key: np.zeros(array.shape, array.dtype, order="F") for key, array in state.items()}
    blocking.load(tmp_path / "c", target)
    assert_same(target, state)


def test_padding_bytes_of_records_survive() -> None:
    base = np.zeros((4, 6), ALIGNED)
    base.reshape(-1).view(np.uint8)[...] = np.resize(np.arange(251, dtype=np.uint8), base.nbytes)
    opaque = f"V{ALIGNED.itemsize}"
    strided = {"transposed": base.T, "columns": base[:, ::2]}
    for state in ({"contiguous": base}, strided, {"recarray": base.view(np.recarray)[::2]}):
        place = fresh_place()
        blocking.save(state, place)
        for name, found in blocking.load(place).items():
            assert found.tobytes() == np.asarray(state[name]).view(opaque).tobytes(), name


def test_memmap_and_recarray_come_back_as_plain_arrays(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "data", np.float32, "w+", shape=(30, 7))
    mapped[...] = np.arange(210).reshape(30, 7)
    records = np.rec.array([(1, 2.5, "a"), (2, -0.0, "b")], dtype=[("n", "i4"), ("x", "f8"), ("s", "U1")])
    place = fresh_place()
    blocking.save({"mapped": mapped, "view": mapped[::2, 1:], "records": records}, place)
    found = blocking.load(place)
    assert_same(found["mapped"], np.array(mapped))
    assert_same(found["view"], np.array(mapped[::2, 1:]))
    assert_same(found["records"], np.array(records.tolist(), [("n", "i4"), ("x", "f8"), ("s", "U1")]))

    filled = np.memmap(tmp_path / "target", np.float32, "w+", shape=(30, 7))
    target = {"mapped": filled, "view": np.zeros((15, 6), "f4"), "records": np.zeros_like(records)}
    blocking.load(place, target)
    assert target["mapped"] is filled
    assert (filled == mapped).all()
    assert type(target["records"]) is np.recarray
    assert (target["records"] == records).all()


async def test_a_view_stores_only_its_own_elements() -> None:
    backend = MemoryBackend()
    base = np.random.default_rng(0).random(1_000_000)
    blocking_options = SaveOptions(compression="none")
    info = await _save({"a": base[:10], "b": base[5000:5100:2]}, (backend, "c"), blocking_options)
    assert info.statistics.raw_bytes == 60 * 8
    assert await stored_bytes(backend) < 10_000


async def _save(state: Any, place: Any, options: SaveOptions) -> CheckpointInfo:
    import savestream

    return await savestream.save(state, place, options=options)


class Labelled(np.ndarray):
    """A subclass whose extra content would be lost."""


REFUSED = {
    "objects": np.array([np.array([1, 2]), "x", None], dtype=object),
    "record with objects": np.zeros(2, [("n", "i4"), ("o", object)]),
    "variable strings": np.array(["a", "bcd"], np.dtypes.StringDType()),
    "masked": np.ma.masked_array([1, 2, 3], mask=[0, 1, 0]),
    "matrix": np.arange(4).reshape(2, 2).view(np.matrix),
    "subclass": np.zeros(3).view(Labelled),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("inside", ["dict", "list"])
def test_what_cannot_be_stored_is_refused_by_key_before_anything_is_written(
    name: str, inside: str, tmp_path: Path
) -> None:
    bad = REFUSED[name]
    nest: Any = {"bad.key": bad} if inside == "dict" else [np.ones(2), bad]
    key = r"layers.bad\.key" if inside == "dict" else "layers[1]"
    blocking.save({"earlier": np.ones(3)}, tmp_path / "step-1")
    before = snapshot(tmp_path)
    for options in (SaveOptions(), SaveOptions(allow_pickle=True)):
        with pytest.raises(UnsafeObjectError) as caught:
            blocking.save({"good": np.ones(1000), "layers": nest}, tmp_path / "step-2", options=options)
        assert key in str(caught.value)
        assert snapshot(tmp_path) == before
    assert not (tmp_path / "step-2").exists()
    assert_same(blocking.load(tmp_path / "step-1"), {"earlier": np.ones(3)})
