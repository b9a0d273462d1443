"""Safetensors files put together and taken apart without any library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

CODES = {
    "bool": "BOOL",
    **{f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)},
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def file_of(header: Any, data: bytes = b"", *, padding: int = 0) -> bytes:
    """A file; ``header`` is JSON or what becomes JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * padding
    return len(text).to_bytes(8, "little") + text + data


def tensors(arrays: Mapping[str, np.ndarray[Any, Any]], metadata: Any = None, *, padding: int = 0) -> bytes:
    """A file that holds these arrays one after the other."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, values in arrays.items():
        end = len(data) + values.nbytes
        offsets = [len(data), end]
        header[name] = {"dtype": CODES[values.dtype.name], "shape": list(values.shape), "data_offsets": offsets}
        data += values.tobytes()
    return file_of(header, data, padding=padding)


def header_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return header


def read(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a file; float4 pairs as bytes."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    names = {code: name for name, code in CODES.items()}
    found = {}
    for key, entry in header_of(path).items():
        if key != "__metadata__":
            start, stop = entry["data_offsets"]
            dtype = dtype_of(names.get(entry["dtype"], "uint8"))
            values = np.frombuffer(data[begin + start : begin + stop], dtype)
            found[key] = values if entry["dtype"] == "F4" else values.reshape(entry["shape"])
    return found


def varied(seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """An array of every dtype, and of every kind of shape."""
    random = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for number, name in enumerate(CODES):
        dtype = dtype_of(name)
        raw = random.integers(0, 2 if name == "bool" else 256, (3 + number, 5 * dtype.itemsize), np.uint8)
        arrays[f"layer.{name}"] = raw.view(dtype)
    arrays["scalar"] = np.float32(1.5)[...]
    arrays["empty"] = np.empty((0, 4), np.float16)
    arrays["\N{BRAIN} \u00e4 [0].x\\y"] = np.arange(3)
    return arrays
