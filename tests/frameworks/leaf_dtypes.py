"""Every dtype that an array leaf may have, framework by framework, and random elements of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

__all__ = [
    "BY_STORED",
    "DTYPES",
    "FRAMEWORKS",
    "KEY_WORDS",
    "NARROWER",
    "ONLY_WITH_X64",
    "WIDER",
    "LeafDtype",
    "element_bits",
    "packed_mask",
    "random_memory",
]


class LeafDtype(NamedTuple):
    """One dtype of one framework: its name there, the name under which it is stored, and what numpy sees of it."""

    framework: str
    name: str
    stored: str
    host: np.dtype[Any]

    @property
    def itemsize(self) -> int:
        return self.host.itemsize

    @property
    def is_complex(self) -> bool:
        return self.host.kind == "c" or self.stored in ("complex32", "bcomplex32")

    @property
    def is_number(self) -> bool:
        """Whether its elements are numbers to numpy, which can convert them."""
        return self.stored not in TORCH_ONLY and (self.host.kind in "biufc" or self.stored in EXTENSIONS)

    @property
    def is_floating(self) -> bool:
        return self.stored.startswith(("float", "bfloat"))


FRAMEWORKS = ("numpy", "torch", "jax")
NATIVE = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
LONG = tuple(np.dtype(code).name for code in "gG")
OTHER_BYTE_ORDER = (
    *(">u2", ">u4", ">u8", ">i2", ">i4", ">i8", ">f2", ">f4", ">f8", ">c8", ">c16"),
    *(np.dtype(code).newbyteorder(">").str for code in "gG"),
)
EXTENSIONS = (
    *("bfloat16", "complex32", "bcomplex32"),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"),
    *("int1", "int2", "int4", "uint1", "uint2", "uint4"),
)
DATES = tuple(f"{order}{kind}8[{unit}]" for kind in "mM" for unit in ("Y", "D", "25us", "ns") for order in "<>")
UNITLESS = ("<m8", "<M8")
TEXT = ("<U5", ">U5", "|S1", "|S7", "<U0", "|S0")
VOID = ("|V1", "|V3", "|V16", "|V0")
RECORDS = {
    "aligned record": np.dtype([("flag", "i1"), ("value", "f8"), ("half", "f2")], align=True),
    "nested record": np.dtype(
        [("when", "M8[D]"), ("inner", [("took", "m8[us]"), ("box", ">i2", (2, 3))]), ("code", "S2")]
    ),
    "record with holes": np.dtype({"names": ["a", "b"], "formats": ["<u2", ">f4"], "offsets": [3, 9], "itemsize": 17}),
    "record of extension types": np.dtype([("weight", ml_dtypes.bfloat16), ("count", "u1")]),
    "record without fields": np.dtype({"names": [], "formats": [], "offsets": [], "itemsize": 5}),
}
STORED_RECORDS = {
    "aligned record": (
        '{"fields":[["flag","int8",0,[]],["value","float64",8,[]],["half","float16",16,[]]],"itemsize":24}'
    ),
    "nested record": (
        '{"fields":[["when","<M8[D]",0,[]],["inner",{"fields":[["took","<m8[us]",0,[]],["box",">i2",8,[2,3]]],'
        '"itemsize":20},8,[]],["code","|S2",28,[]]],"itemsize":30}'
    ),
    "record with holes": '{"fields":[["a","uint16",3,[]],["b",">f4",9,[]]],"itemsize":17}',
    "record of extension types": '{"fields":[["weight","bfloat16",0,[]],["count","uint8",2,[]]],"itemsize":3}',
    "record without fields": '{"fields":[],"itemsize":5}',
}
TORCH_EXTENSIONS = (
    *("bfloat16", "complex32"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("int1", "int2", "int4", "uint1", "uint2", "uint4"),
)
TORCH_ONLY = {  # numpy has no such type: it sees integers that hold the same bytes
    **{f"{sign}int{bits}": np.uint8 for sign in ("", "u") for bits in (3, 5, 6, 7)},
    **dict.fromkeys(("float4_e2m1fn_x2", "bits8", "bits1x8", "bits2x4", "bits4x2"), np.uint8),
    "bits16": np.uint16,
}
JAX_EXTENSIONS = (
    *("bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn", "int2", "int4", "uint2", "uint4"),
)
KEY_WORDS: Mapping[str, int] = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}
ONLY_WITH_X64 = frozenset({"int64", "uint64", "float64", "complex128"})


def _rows(framework: str, names: tuple[str, ...]) -> list[LeafDtype]:
    """Dtypes that are stored under the name that numpy, or ml_dtypes, has for them."""
    return [LeafDtype(framework, name, name, np.dtype(getattr(ml_dtypes, name, name))) for name in names]


def _key_row(implementation: str, words: int) -> LeafDtype:
    host = np.dtype([("key_data", "<u4", (words,))])
    return LeafDtype("jax", f"key<{implementation}>", f"prng_key<{implementation}>", host)


DTYPES: tuple[LeafDtype, ...] = (
    *(LeafDtype("numpy", code.__name__, np.dtype(code).name, np.dtype(code)) for code in (np.longlong, np.ulonglong)),
    *_rows("numpy", (*NATIVE, *LONG, *EXTENSIONS, *OTHER_BYTE_ORDER, *DATES, *UNITLESS, *TEXT, *VOID)),
    *(LeafDtype("numpy", name, STORED_RECORDS[name], dtype) for name, dtype in RECORDS.items()),
    *_rows("torch", (*NATIVE, *TORCH_EXTENSIONS)),
    *(LeafDtype("torch", name, name, np.dtype(host)) for name, host in TORCH_ONLY.items()),
    *_rows("jax", (*NATIVE, *JAX_EXTENSIONS)),
    *(_key_row(implementation, words) for implementation, words in KEY_WORDS.items()),
)
BY_STORED: Mapping[str, Mapping[str, LeafDtype]] = {
    framework: {dtype.stored: dtype for dtype in DTYPES if dtype.framework == framework} for framework in FRAMEWORKS
}

# Where values are converted on the way into a target: a dtype that holds them all, and one that does not.
WIDER: Mapping[str, str] = {
    **dict.fromkeys(("bool", "uint1", "uint2", "uint4"), "uint8"),
    **dict.fromkeys(("int1", "int2", "int4"), "int8"),
    **{name: "float32" for name in ("float16", *EXTENSIONS) if "float" in name},
    **dict.fromkeys(("complex32", "bcomplex32"), "complex64"),
    **dict(zip(("uint8", "uint16", "uint32"), ("uint16", "uint32", "uint64"), strict=True)),
    **dict(zip(("int8", "int16", "int32", "int64"), ("int16", "int32", "int64", ">i8"), strict=True)),
    **dict(
        zip(("float32", "float64", "complex64", "complex128"), ("float64", LONG[0], "complex128", LONG[1]), strict=True)
    ),
    **dict(zip((">i2", ">u8", ">f4", ">c8"), ("int32", "uint64", "float64", "complex128"), strict=True)),
}
NARROWER: Mapping[str, str] = {
    **dict(zip(("uint8", "uint16", "uint32", "uint64"), ("uint4", "uint8", "uint16", "uint8"), strict=True)),
    **dict(zip(("int8", "int16", "int32", "int64"), ("int4", "int8", "int8", "int32"), strict=True)),
    **dict(zip(("float64", "float32", "float16"), ("float32", "bfloat16", "float8_e5m2"), strict=True)),
    **dict(
        zip(
            ("bfloat16", "float8_e4m3fn", "float8_e5m2"), ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"), strict=True
        )
    ),
    **dict(zip(("complex128", "complex64", *LONG), ("complex64", "complex32", "float64", "complex64"), strict=True)),
    **dict(zip((">i8", ">u4", ">c16", ">f8"), ("int16", "uint16", "complex64", "float16"), strict=True)),
}


def packed_mask(stored: str) -> int:
    """The bits of an element's byte that JAX keeps; on a device it packs several elements into one byte."""
    return {"int2": 0x03, "uint2": 0x03, "int4": 0x0F, "uint4": 0x0F, "float4_e2m1fn": 0x0F}.get(stored, 0xFF)


def random_memory(dtype: LeafDtype, generator: np.random.Generator, count: int) -> np.ndarray:
    """Writable bytes of ``count`` elements: any bits that an element can have, NaN payloads and -0.0 among them."""
    if dtype.host.kind == "b":
        return generator.integers(0, 2, count, np.uint8)
    if dtype.host.kind == "U":
        characters = np.array([0, 1, 65, 0xE9, 0xD800, 0x1F9E0, 0x10FFFF], "u4").astype(dtype.host.byteorder + "u4")
        return generator.choice(characters, count * dtype.itemsize // 4).view(np.uint8)
    memory = np.frombuffer(bytearray(generator.bytes(count * dtype.itemsize)), np.uint8)
    if dtype.framework == "jax":
        memory &= np.uint8(packed_mask(dtype.stored))
    return memory


def element_bits(array: np.ndarray) -> bytes:
    """The bits of an array's elements in C order. The last six bytes of an 80-bit number mean nothing."""
    itemsize = array.dtype.itemsize
    if not itemsize:
        return b""
    elements = array.view(f"V{itemsize}").tobytes()
    if array.dtype.type not in (np.longdouble, np.clongdouble) or np.finfo(np.longdouble).nmant != 63:
        return elements
    numbers = np.frombuffer(elements, np.uint8).reshape(-1, np.dtype(np.longdouble).itemsize)
    significant = slice(0, 10) if array.dtype.isnative else slice(6, 16)
    return numbers[:, significant].tobytes()
