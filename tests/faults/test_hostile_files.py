"""Files made to harm: nothing in them is executed, followed, or given the memory that it claims."""

from __future__ import annotations

import ast
import asyncio
import base64
import hashlib
import os
import pathlib
import pickle
import pickletools
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import xxhash
import zstandard
from fault_support import assert_same, make_state
from tampering import Tampered, compact, tampered

import savestream
from savestream.errors import CorruptCheckpointError, SavestreamError, StorageError, UnsupportedFormatError
from savestream.pipeline.codecs import ZSTD

LEAF_BYTES = 1024
FUNCTIONS = [savestream.load, savestream.verify]


class Marker:
    """Unpickling this makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


async def refused(place, *errors):
    """Loading, verifying, iterating and (into a target) loading again are all refused."""
    messages = []
    for function in FUNCTIONS:
        with pytest.raises(errors or CorruptCheckpointError) as caught:
            await function(place)
        messages.append(str(caught.value))
    with pytest.raises(errors or CorruptCheckpointError):
        async for _ in savestream.iter_arrays(place):
            pass
    return messages[0]


def small_state():
    return {"leaf": np.arange(LEAF_BYTES, dtype=np.uint8), "other": np.ones((5, 5)), "value": 3}


# --- pickles and random bytes ---


@pytest.mark.parametrize("file", ["root", "part", "data"])
@pytest.mark.parametrize("protocol", [0, 2, 4])
async def test_a_pickle_in_place_of_a_file_is_not_executed(file, protocol, tmp_path):
    opened = await tampered(tmp_path / "step", small_state())
    path = {"root": tmp_path / "step" / "manifest.json", "part": opened.part_path, "data": opened.data_path}[file]
    path.write_bytes(pickle.dumps(Marker(tmp_path / "marker"), protocol))
    assert str(tmp_path / "step") in await refused(tmp_path / "step")
    opened.write(data=file != "data")  # and with every hash right, if the data object is the pickle
    if file == "data":
        await refused(tmp_path / "step")
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("file", ["root", "part", "data"])
async def test_random_bytes_in_place_of_a_file_are_refused(file, tmp_path):
    opened = await tampered(tmp_path / "step", small_state())
    path = {"root": tmp_path / "step" / "manifest.json", "part": opened.part_path, "data": opened.data_path}[file]
    size = path.stat().st_size
    for seed in range(20):
        noise = random.Random(seed).randbytes(size if seed % 2 else seed)
        path.write_bytes(noise)
        await refused(tmp_path / "step")


async def test_nothing_that_is_written_is_a_pickle(tmp_path):
    """Not even with the opt-in to pickle, as long as nothing needs it."""
    for allow_pickle in (False, True):
        place = tmp_path / str(allow_pickle)
        await tampered(place, make_state(1), allow_pickle=allow_pickle)
        for path in place.rglob("*"):
            if path.is_file():
                assert not is_pickle(path.read_bytes()), path
    assert is_pickle(pickle.dumps({"a": 1}))


def is_pickle(data):
    """Whether the opcodes from the first byte on make sense up to a STOP."""
    try:
        return any(opcode.name == "STOP" for opcode, _, _ in pickletools.genops(data))
    except (ValueError, UnicodeDecodeError):
        return False


def test_only_the_opt_in_of_value_decoding_unpickles():
    """Nor is there anything else on the way that executes: eval, exec, marshal, import of what a file names."""
    package = pathlib.Path(savestream.__file__).parent
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            found |= {(path.stem, name) for name in executing_names(node)}
    # Others dump for the opt-in of saving, or name the errors of torch's safe reader.
    imported = {("value_decoding", "pickle"), ("value_refusals", "pickle"), ("torch_reader", "pickle")}
    assert found <= {("value_decoding", "pickle.load"), *imported}
    assert ("value_decoding", "pickle.load") in found


def executing_names(node):
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names if alias.name in forbidden}
    if isinstance(node, ast.ImportFrom):
        return {node.module} & forbidden
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        if called in ("eval", "exec", "__import__", "pickle.load", "pickle.loads", "pickle.Unpickler", "numpy.load"):
            return {called}
    return set()


async def test_a_stored_pickle_needs_the_readers_opt_in(tmp_path):
    state = {"danger": Marker(tmp_path / "marker"), "leaf": np.ones(3)}
    await savestream.save(state, tmp_path / "step", options=savestream.SaveOptions(allow_pickle=True))
    with pytest.raises(savestream.UnsafeObjectError, match="danger"):
        await savestream.load(tmp_path / "step")
    await savestream.verify(tmp_path / "step")
    assert not (tmp_path / "marker").exists()
    assert_same(await savestream.load(tmp_path / "step", keys="leaf"), {"leaf": np.ones(3)})


# --- paths and links ---

PATHS = ["../../marker", "/tmp/marker", "marker", "x/../../marker", "..", "", "step\\r00000-0000.bin", "a\0b"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("what", ["part", "object"])
async def test_paths_that_lead_elsewhere_are_refused(what, path, tmp_path):
    opened = await tampered(tmp_path / "step", small_state())
    for marker in (tmp_path / "marker", tmp_path.parent / "marker", tmp_path / "step" / "marker"):
        marker.write_bytes(opened.data)
    if what == "part":
        opened.root["parts"][0]["path"] = path
        opened.write_root()
    else:
        opened.part["objects"][0]["path"] = path
        opened.write()
    await refused(tmp_path / "step")


@pytest.mark.parametrize("name", ["../../marker", "/tmp/marker", "a/b", "..", "\0"])
async def test_keys_never_become_paths(name, tmp_path):
    """Such names are fine: they are only names."""
    state = {name: np.arange(5), "nested": {name: {"deep": name}}}
    await savestream.save(state, tmp_path / "in" / "step")
    assert_same(await savestream.load(tmp_path / "in" / "step"), state)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


async def test_a_save_id_that_is_a_path_is_refused(tmp_path):
    for save_id in ("../" * 10 + "a", "." * 32, "A" * 32, "0" * 31, "/" * 32):
        opened = await tampered(tmp_path / save_id[-3:].replace("/", "_") / "step", small_state())
        opened.root["checkpoint_id"] = opened.part["checkpoint_id"] = save_id
        opened.root["parts"][0]["path"] = f"{save_id}/r00000.index.json"
        opened.part["objects"][0]["path"] = f"{save_id}/r00000-0000.bin"
        opened.write()
        await refused(opened.place)
        with pytest.raises(CorruptCheckpointError):
            await savestream.read_manifest(opened.place)


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="plants symbolic links")
@pytest.mark.parametrize("what", ["data", "part", "directory", "root"])
async def test_planted_links_are_not_followed(what, tmp_path):
    opened = await tampered(tmp_path / "step", small_state())
    directory = opened.data_path.parent
    secret = tmp_path / "secret"
    secret.mkdir()
    if what == "directory":
        for path in list(directory.iterdir()):
            path.rename(secret / path.name)
        directory.rmdir()
        directory.symlink_to(secret, target_is_directory=True)
    else:
        victim = {"data": opened.data_path, "part": opened.part_path, "root": tmp_path / "step" / "manifest.json"}[what]
        victim.rename(secret / "content")
        victim.symlink_to(secret / "content")
    # The right content lies behind the link: only following it could make this load.
    with pytest.raises((StorageError, CorruptCheckpointError, savestream.CheckpointNotFoundError)) as caught:
        await savestream.load(tmp_path / "step")
    assert str(tmp_path / "step") in str(caught.value)
    with pytest.raises(SavestreamError):
        await savestream.verify(tmp_path / "step")


async def test_saving_and_deleting_do_not_follow_planted_links(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "r00000-0000.bin").write_bytes(b"precious")
    opened = await tampered(tmp_path / "step", small_state())
    directory = opened.data_path.parent
    for path in list(directory.iterdir()):
        path.unlink()
    directory.rmdir()
    directory.symlink_to(tmp_path / "outside", target_is_directory=True)
    await savestream.save({"a": 1}, tmp_path / "step", overwrite=True)
    assert await savestream.load(tmp_path / "step") == {"a": 1}
    await savestream.delete(tmp_path / "step")
    assert (tmp_path / "outside" / "r00000-0000.bin").read_bytes() == b"precious"


# --- bombs ---


def bomb(claimed=None):
    """A valid frame of 1 GiB of zeros in a few KiB, whatever it claims."""
    compressor = zstandard.ZstdCompressor(level=1, write_content_size=claimed is not None)
    chunks = compressor.compressobj(size=claimed if claimed is not None else -1)
    zeros = bytes(1 << 20)
    stored = b"".join(chunks.compress(zeros) for _ in range(1024))
    return stored + chunks.flush()


def claiming(size):
    """A frame that claims ``size`` bytes of content and a window of 2 MiB, and holds 70,000 bytes."""
    frame = zstandard.ZstdCompressor(write_content_size=True).compress(b"x" * 70_000)
    assert frame[4] & 0xE0 == 0xA0, "a single segment with a content size of four bytes is expected"
    return frame[:4] + b"\xc0\x58" + size.to_bytes(8, "little") + frame[9:]


def short_frame(count):
    return zstandard.ZstdCompressor(write_content_size=True).compress(bytes(count))


BOMBS = {
    "one GiB that says so": lambda: bomb(1 << 30),
    "one GiB without a size": lambda: bomb(),
    "a claim of 2**60": lambda: claiming(1 << 60),
    "two frames": lambda: short_frame(LEAF_BYTES // 2) * 2,
    "a frame and a second one": lambda: short_frame(LEAF_BYTES) * 2,
    "too short": lambda: short_frame(LEAF_BYTES - 1),
    "too long by one": lambda: short_frame(LEAF_BYTES + 1),
    "no frame": lambda: b"\0" * 40,
    "a skippable frame before it": lambda: b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + short_frame(LEAF_BYTES),
}

LOADING = """
import asyncio, resource, sys
import savestream
async def main():
    try:
        await savestream.load(sys.argv[1])
    except savestream.SavestreamError as error:
        print(type(error).__name__, str(error)[:300].replace(chr(10), " "))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if len(sys.argv) > 2:
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
asyncio.run(main())
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


async def load_elsewhere(place, *limits):
    """(error, MiB by which the peak of a fresh process grew)."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LOADING, str(place), *limits, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    lines = out.decode().splitlines()
    assert len(lines) == 2, err.decode()
    return lines[0], int(lines[1])


@pytest.mark.parametrize("name", BOMBS)
async def test_bombs_are_refused_before_they_unfold(name, tmp_path):
    opened = await tampered(tmp_path / "step", {"leaf": np.arange(LEAF_BYTES, dtype=np.uint8)})
    stored = BOMBS[name]()
    opened.replace_frame(0, stored, codec=ZSTD)
    opened.write()
    message = await refused(tmp_path / "step")
    if len(stored) <= LEAF_BYTES:  # longer ones are refused for being longer than what they stand for
        assert "leaf" in message
        assert named_data(message)


@pytest.mark.parametrize("name", ["one GiB that says so", "one GiB without a size", "a claim of 2**60"])
async def test_bombs_take_no_memory(name, tmp_path):
    """The leaf is 1 MiB, so that even a whole bomb is shorter than it."""
    opened = await tampered(tmp_path / "step", {"leaf": np.arange(1 << 20, dtype=np.uint8)}, compression="none")
    stored = BOMBS[name]()
    assert len(stored) < 1 << 20
    opened.replace_frame(0, stored, codec=ZSTD)
    opened.write()
    error, grown = await load_elsewhere(tmp_path / "step")
    assert error.startswith("CorruptCheckpointError")
    assert "leaf" in error
    assert grown < 64


def named_data(message):
    return re.search(r"r00000-0000\.bin: bytes \d+-\d+ are damaged", message)


# --- sizes that lie ---


def claim_large(opened: Tampered, elements: int, *, coded: bool) -> None:
    """Let the only tensor, of uint8, claim to be that large, and everything else agree with it."""
    opened.root["tensors"]["shape"] = [elements]
    opened.root["chunks"]["sizes"] = [elements]
    opened.root["parts"][0]["raw_bytes"] = elements
    frames = opened.frames
    count = -(-elements // (1 << 30))
    length = elements // count
    stored = claiming(length)
    opened.data[: len(stored)] = stored
    for name in ("stored_digest", "raw_digest"):
        frames[name] = {**frames[name], "count": count, "b64": zeros_b64(16 * count)}
    frames |= {"raw_length": [length] * count, "codec": [ZSTD if coded else 0] * count, "itemsize": [1] * count}
    frames |= {"object": [0] * count, "stored_length": [len(stored) if coded else length] * count}
    frames["offset"] = [0 if coded else number * length for number in range(count)]
    if coded:
        digest = xxhash.xxh3_128(stored).digest() * count
        frames["stored_digest"]["b64"] = base64.b64encode(digest).decode()
    else:
        opened.part["objects"][0]["bytes"] = elements


def zeros_b64(count):
    return base64.b64encode(bytes(count)).decode()


@pytest.mark.parametrize("coded", [False, True], ids=["raw", "coded"])
@pytest.mark.parametrize("elements", [200 << 20, 1 << 40])
async def test_tensors_that_claim_more_than_is_there_are_refused(coded, elements, tmp_path):
    opened = await tampered(tmp_path / "step", {"leaf": np.arange(1 << 16, dtype=np.uint8)}, compression="none")
    claim_large(opened, elements, coded=coded)
    opened.write()
    error, grown = await load_elsewhere(tmp_path / "step")
    assert error.split()[0] in ("CorruptCheckpointError", "StorageError")
    assert grown < 64
    error, grown = await load_elsewhere(tmp_path / "step", str(2 << 30))
    assert error.split()[0] in ("CorruptCheckpointError", "StorageError")
    assert grown < 64
    with pytest.raises(CorruptCheckpointError):
        await savestream.verify(tmp_path / "step")
    target = {"leaf": np.zeros(1 << 16, np.uint8)}
    with pytest.raises(savestream.LoadMismatchError, match="leaf"):
        await savestream.load(tmp_path / "step", target)
    assert not target["leaf"].any()


@pytest.mark.parametrize("kind", [1, 2], ids=["bytes", "pickle"])
async def test_opaque_bytes_that_claim_more_than_is_there_are_refused(kind, tmp_path):
    opened = await tampered(tmp_path / "step", {"leaf": np.arange(1 << 16, dtype=np.uint8)}, compression="none")
    claim_large(opened, 1 << 42, coded=True)
    opened.root["tensors"]["kind"] = [kind]
    opened.write()
    with pytest.raises((CorruptCheckpointError, StorageError)):
        await savestream.load(tmp_path / "step")


LIES = {
    "a frame beyond the object": lambda part, root: part["frames"]["offset"].__setitem__(0, 1 << 40),
    "a negative offset": lambda part, root: part["frames"]["offset"].__setitem__(0, -4096),
    "a frame in no object": lambda part, root: part["frames"]["object"].__setitem__(0, 7),
    "an object of 2**62 bytes": lambda part, root: part["objects"][0].__setitem__("bytes", 1 << 62),
    "an object of -1 bytes": lambda part, root: part["objects"][0].__setitem__("bytes", -1),
    "a chunk beyond the stream": lambda part, root: root["chunks"]["raw_offset"].__setitem__(0, 1 << 40),
    "a chunk of negative size": lambda part, root: root["chunks"]["sizes"].__setitem__(0, -1),
    "a shape of 2**61": lambda part, root: root["tensors"]["shape"].__setitem__(0, 1 << 61),
    "an unknown codec": lambda part, root: part["frames"]["codec"].__setitem__(0, 9),
    "an unknown dtype": lambda part, root: root["dtypes"].__setitem__(0, "os.system"),
    "an object dtype": lambda part, root: root["dtypes"].__setitem__(0, "object"),
    "a part in rank 5": lambda part, root: root["parts"][0].__setitem__("rank", 5),
    "a stream of another length": lambda part, root: root["parts"][0].__setitem__("raw_bytes", 5),
}


@pytest.mark.parametrize("name", LIES)
async def test_tables_that_contradict_the_data_are_refused(name, tmp_path):
    opened = await tampered(tmp_path / "step", small_state(), compression="none")
    LIES[name](opened.part, opened.root)
    opened.write()
    if name == "an object of 2**62 bytes":  # the frames lie where they did: only verify can tell
        with pytest.raises(CorruptCheckpointError, match="truncated"):
            await savestream.verify(tmp_path / "step")
        assert_same(await savestream.load(tmp_path / "step"), small_state())
    else:
        await refused(tmp_path / "step", CorruptCheckpointError, UnsupportedFormatError)


# --- versions, features, other checkpoints' data ---


@pytest.mark.parametrize(
    ("member", "value", "named"), [("version", [2, 0], "2"), ("requires", ["time-travel"], "time-travel")]
)
@pytest.mark.parametrize("file", ["root", "part"])
async def test_newer_formats_are_refused_by_name(file, member, value, named, tmp_path):
    opened = await tampered(tmp_path / "step", small_state())
    (opened.root if file == "root" else opened.part)[member] = value
    opened.write()
    with pytest.raises(UnsupportedFormatError, match=named) as caught:
        await savestream.load(tmp_path / "step")
    assert "newer" in str(caught.value)
    if file == "root":
        with pytest.raises(UnsupportedFormatError):
            await savestream.delete(tmp_path / "step")
        assert (tmp_path / "step" / "manifest.json").exists()
        assert opened.data_path.exists()


async def test_a_newer_minor_version_with_unknown_members_still_loads(tmp_path):
    opened = await tampered(tmp_path / "step", small_state())
    opened.root["version"] = opened.part["version"] = [1, 9]
    opened.part["colour"] = "blue"
    opened.root = {**{key: value for key, value in opened.root.items() if key != "sha256"}, "mood": {"deep": [1]}}
    opened.write()
    assert_same(await savestream.load(tmp_path / "step"), small_state())


async def test_data_of_other_checkpoints_is_refused_clearly(tmp_path):
    opened = await tampered(tmp_path / "one", small_state())
    opened.root["depends_on"] = ["0" * 32]
    opened.write()
    with pytest.raises(UnsupportedFormatError, match=r"depends_on.*newer"):
        await savestream.load(tmp_path / "one")
    opened = await tampered(tmp_path / "two", small_state())
    opened.part["objects"][0] |= {"source": 1, "path": f"{'0' * 32}/r00000-0000.bin"}
    opened.write()
    with pytest.raises(UnsupportedFormatError, match=r"other checkpoints.*newer"):
        await savestream.load(tmp_path / "two")


# --- JSON ---


async def test_json_made_to_confuse_is_refused(tmp_path):
    opened = await tampered(tmp_path / "step", small_state())
    body = compact({name: value for name, value in opened.root.items() if name != "sha256"})[:-1]
    evil = {
        "a member twice": body + b',"world_size":1',
        "a nest": body + b',"deep":' + b"[" * 100_000 + b"]" * 100_000,
        "NaN": body.replace(b'"world_size":1', b'"world_size":NaN'),
        "a long number": body + b',"long":' + b"9" * 100_000,
    }
    for name, text in evil.items():
        sealed = text + f',"sha256":"{hashlib.sha256(text).hexdigest()}"}}'.encode()
        (tmp_path / "step" / "manifest.json").write_bytes(sealed)
        assert "manifest.json" in await refused(tmp_path / "step"), name


async def test_what_was_tampered_with_by_this_file_was_sound_before(tmp_path):
    """The tools of these tests write checkpoints that load: what is refused above is refused for the lie alone."""
    opened = await tampered(tmp_path / "step", small_state(), compression="none")
    opened.write()
    assert_same(await savestream.load(tmp_path / "step"), small_state())
    frame = opened.frames_of(LEAF_BYTES)[0]
    content = bytes(opened.data[opened.frames["offset"][frame] :][:LEAF_BYTES])
    opened.replace_frame(frame, zstandard.ZstdCompressor(write_content_size=True).compress(content), codec=ZSTD)
    opened.write()
    assert_same(await savestream.load(tmp_path / "step"), small_state())
