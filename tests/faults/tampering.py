"""Rebuilds checkpoints that lie but agree with themselves: every hash is right, the content is not."""

from __future__ import annotations

import base64
import hashlib
import json
import pathlib
from typing import Any

import numpy as np
import xxhash

import savestream

SEAL_BYTES = 77  # ,"sha256":"..."}


class Tampered:
    """A checkpoint of one rank on disk, opened for lies. Change ``root``, ``part`` and ``data``; then ``write``.

    The state must be small enough for the tables to be plain JSON lists (up to 256 rows).
    """

    def __init__(self, place: pathlib.Path) -> None:
        self.place = place
        self.root: dict[str, Any] = json.loads((place / "manifest.json").read_bytes())
        self.part_path = place / self.root["parts"][0]["path"]
        self.part: dict[str, Any] = json.loads(self.part_path.read_bytes())
        self.data_path = place / self.part["objects"][0]["path"]
        self.data = bytearray(self.data_path.read_bytes())

    @property
    def frames(self) -> dict[str, list[Any]]:
        return self.part["frames"]

    def frames_of(self, length: int) -> list[int]:
        """The frames of a raw length."""
        return [number for number, found in enumerate(self.frames["raw_length"]) if found == length]

    def replace_frame(self, number: int, stored: bytes, *, codec: int | None = None) -> None:
        """Put other stored bytes at the end of the object, with the digest that they have."""
        self.data += bytes(-len(self.data) % 4096)
        self.frames["offset"][number] = len(self.data)
        self.frames["stored_length"][number] = len(stored)
        self.data += stored
        self.part["objects"][0]["bytes"] = len(self.data)
        digests = np.frombuffer(_decoded(self.frames["stored_digest"]), np.uint8).reshape(-1, 16).copy()
        digests[number] = np.frombuffer(xxhash.xxh3_128(stored).digest(), np.uint8)
        self.frames["stored_digest"] = _encoded(digests, self.frames["stored_digest"])
        if codec is not None:
            self.frames["codec"][number] = codec

    def write(self, *, data: bool = True) -> None:
        """Write everything back, with lengths and hashes that fit."""
        if data:
            self.data_path.write_bytes(self.data)
        part = compact(self.part)
        self.part_path.write_bytes(part)
        self.root["parts"][0] |= {"bytes": len(part), "sha256": hashlib.sha256(part).hexdigest()}
        self.write_root()

    def write_root(self) -> None:
        (self.place / "manifest.json").write_bytes(sealed(self.root))


def compact(members: dict[str, Any]) -> bytes:
    return json.dumps(members, separators=(",", ":")).encode()


def sealed(members: dict[str, Any]) -> bytes:
    """A root with the SHA-256 that it claims."""
    body = compact({name: value for name, value in members.items() if name != "sha256"})[:-1]
    return body + f',"sha256":"{hashlib.sha256(body).hexdigest()}"}}'.encode()


def _decoded(column: dict[str, Any]) -> bytes:
    return base64.b64decode(column["b64"])


def _encoded(digests: np.ndarray, column: dict[str, Any]) -> dict[str, Any]:
    return {**column, "b64": base64.b64encode(digests.tobytes()).decode()}


async def tampered(place: pathlib.Path, state: object, **options: Any) -> Tampered:
    """Save a state and open what was written."""
    await savestream.save(state, place, options=savestream.SaveOptions(**options))
    return Tampered(place)
