"""Damaged files: every flipped bit is found or provably harmless, and what is undamaged still loads."""

from __future__ import annotations

import bisect
import pathlib
import random
import re
import shutil

import numpy as np
import pytest
from fault_support import SmallObjects, assert_same
from tampering import Tampered

import savestream
from savestream.errors import CorruptCheckpointError
from savestream.storage_backends import FileBackend

COMPRESSIONS = ["none", "zstd"]


def damage_state(seed: int = 0) -> dict[str, object]:
    """Leaves whose frames lie apart, with padding between them where they are stored raw."""
    numbers = np.random.default_rng(seed)
    return {
        "first": numbers.standard_normal(700_000).astype(np.float32),
        "second": np.repeat(numbers.integers(0, 9, 30_000), 9),
        "third": numbers.integers(0, 255, 300_001, np.uint8),
        "small": numbers.random((3, 4)),
        "note": "plain",
    }


KEYS = [key for key, value in damage_state().items() if isinstance(value, np.ndarray)]


@pytest.fixture(params=COMPRESSIONS)
def compression(request):
    return request.param


async def saved(place, compression, seed=0):
    state = damage_state(seed)
    await savestream.save(state, place, options=savestream.SaveOptions(compression=compression))
    return state, Tampered(pathlib.Path(place))


class Flipped:
    """One bit of a file is wrong inside the block."""

    def __init__(self, path: pathlib.Path, offset: int, bit: int) -> None:
        self.path, self.offset, self.bit = path, offset, bit

    def _flip(self):
        with self.path.open("r+b") as file:
            file.seek(self.offset)
            byte = file.read(1)[0]
            file.seek(self.offset)
            file.write(bytes([byte ^ 1 << self.bit]))

    def __enter__(self):
        self._flip()

    def __exit__(self, *error):
        self._flip()


def named_range(message):
    """The byte range that a message names."""
    found = re.search(r"bytes (\d+)-(\d+)", message)
    assert found, message
    return int(found[1]), int(found[2])


def frame_table(opened):
    """(start, end) of each frame in the data object, in order of position."""
    frames = opened.frames
    return sorted(zip(frames["offset"], np.add(frames["offset"], frames["stored_length"]).tolist(), strict=True))


def offsets_to_flip(opened, size):
    """First, last and some bytes of every frame, and of every gap between two."""
    chosen = set(random.Random(1).sample(range(size), 25))
    end = 0
    for start, stop in frame_table(opened):
        chosen |= {start, (start + stop) // 2, stop - 1}
        chosen |= {end, start - 1} if start > end else set()
        end = max(end, stop)
    chosen |= {end} if end < size else set()
    return sorted(offset for offset in chosen if 0 <= offset < size)


async def test_every_flipped_bit_of_the_data_is_found_or_lies_in_padding(compression, tmp_path):
    state, opened = await saved(tmp_path / "step", compression)
    table = frame_table(opened)
    starts = [start for start, _ in table]
    found, harmless = 0, 0
    for number, offset in enumerate(offsets_to_flip(opened, opened.data_path.stat().st_size)):
        position = bisect.bisect_right(starts, offset) - 1
        inside = position >= 0 and offset < table[position][1]
        with Flipped(opened.data_path, offset, number % 8):
            if not inside:
                assert_same(await savestream.load(tmp_path / "step"), state)
                await savestream.verify(tmp_path / "step")
                harmless += 1
                continue
            with pytest.raises(CorruptCheckpointError) as caught:
                await savestream.load(tmp_path / "step")
            assert opened.data_path.name in str(caught.value)
            assert named_range(str(caught.value)) == table[position]
            affected = [key for key in KEYS if repr(key) in str(caught.value)]
            assert affected, str(caught.value)
            await check_the_rest(tmp_path / "step", state, affected)
            found += 1
    assert found > 20
    assert harmless or compression == "zstd"


async def check_the_rest(place, state, affected, problems=1):
    """Undamaged keys load, the others do not, and into a target neither."""
    whole = [key for key in state if key not in affected]
    rest = await savestream.load(place, keys=whole)
    assert_same(rest, {key: state[key] for key in whole})
    for key in affected:
        with pytest.raises(CorruptCheckpointError, match=key):
            await savestream.load(place, {key: np.empty_like(state[key])}, strict=False)
    with pytest.raises(CorruptCheckpointError) as caught:
        await savestream.verify(place)
    assert len(caught.value.problems) == problems


@pytest.mark.parametrize("file", ["root", "part"])
async def test_every_flipped_bit_of_the_metadata_is_found(compression, file, tmp_path):
    _, opened = await saved(tmp_path / "step", compression)
    path = tmp_path / "step" / "manifest.json" if file == "root" else opened.part_path
    size = path.stat().st_size
    offsets = set(random.Random(2).sample(range(size), 50)) | {0, 1, size - 1, size - 2, size - 70, size - 77}
    for number, offset in enumerate(sorted(offsets)):
        with Flipped(path, offset, number % 8):
            for function in (savestream.load, savestream.verify):
                with pytest.raises(CorruptCheckpointError) as caught:
                    await function(tmp_path / "step")
                assert path.name in str(caught.value)
            if file == "root":
                with pytest.raises(CorruptCheckpointError):
                    await savestream.read_manifest(tmp_path / "step")
    await savestream.verify(tmp_path / "step")


async def test_values_that_stand_in_the_root_load_although_the_data_is_damaged(compression, tmp_path):
    state, opened = await saved(tmp_path / "step", compression)
    opened.data_path.unlink()
    opened.part_path.unlink()
    assert await savestream.load(tmp_path / "step", keys="note") == {"note": state["note"]}


@pytest.mark.parametrize("file", ["root", "part", "data"])
@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.999])
async def test_truncated_files_are_found(compression, file, kept, tmp_path):
    _, opened = await saved(tmp_path / "step", compression)
    path = {"root": tmp_path / "step" / "manifest.json", "part": opened.part_path, "data": opened.data_path}[file]
    with path.open("r+b") as stream:
        stream.truncate(int(path.stat().st_size * kept))
    for function in (savestream.load, savestream.verify):
        with pytest.raises(CorruptCheckpointError, match=re.escape(path.name)):
            await function(tmp_path / "step")


@pytest.mark.parametrize("file", ["part", "data"])
async def test_missing_files_are_found(compression, file, tmp_path):
    _, opened = await saved(tmp_path / "step", compression)
    path = opened.part_path if file == "part" else opened.data_path
    path.unlink()
    for function in (savestream.load, savestream.verify):
        with pytest.raises(CorruptCheckpointError, match=rf"{re.escape(path.name)}.*missing"):
            await function(tmp_path / "step")


@pytest.mark.parametrize("file", ["root", "part"])
async def test_extended_metadata_is_found(compression, file, tmp_path):
    _, opened = await saved(tmp_path / "step", compression)
    path = tmp_path / "step" / "manifest.json" if file == "root" else opened.part_path
    with path.open("ab") as stream:
        stream.write(b" ")
    for function in (savestream.load, savestream.verify):
        with pytest.raises(CorruptCheckpointError, match=re.escape(path.name)):
            await function(tmp_path / "step")


async def test_bytes_after_the_data_harm_no_key_but_verify_tells_of_them(compression, tmp_path):
    state, opened = await saved(tmp_path / "step", compression)
    with opened.data_path.open("ab") as stream:
        stream.write(b"something else" * 500)
    assert_same(await savestream.load(tmp_path / "step"), state)
    with pytest.raises(CorruptCheckpointError, match=r"extended.*keys affected: none"):
        await savestream.verify(tmp_path / "step")


@pytest.mark.parametrize("file", ["root", "part", "data"])
async def test_files_swapped_between_two_checkpoints_are_found(compression, file, tmp_path):
    """Same shapes, same sizes: only the content tells."""
    _, one = await saved(tmp_path / "one", compression, seed=1)
    _, two = await saved(tmp_path / "two", compression, seed=2)
    paths = {
        "root": (one.place / "manifest.json", two.place / "manifest.json"),
        "part": (one.part_path, two.part_path),
        "data": (one.data_path, two.data_path),
    }[file]
    content = [path.read_bytes() for path in paths]
    for path, other in zip(paths, reversed(content), strict=True):
        path.write_bytes(other)
    for place in ("one", "two"):
        for function in (savestream.load, savestream.verify):
            with pytest.raises(CorruptCheckpointError):
                await function(tmp_path / place)


async def test_objects_of_one_checkpoint_that_changed_places_are_found(tmp_path):
    from fault_support import SmallObjects

    from savestream.storage_backends import FileBackend

    """Equal lengths, in one checkpoint: only the digests tell."""
    state = {f"leaf{number}": np.full(1 << 20, number, np.int32) for number in range(4)}
    options = savestream.SaveOptions(memory_budget_bytes=4 << 20, compression="none", threads=1)
    await savestream.save(state, (SmallObjects(FileBackend(tmp_path)), "step"), options=options)
    files = sorted((tmp_path / "step").glob("*/*.bin"))
    assert [path.stat().st_size for path in files] == [4 << 20] * 4
    files[0].rename(tmp_path / "aside")
    files[1].rename(files[0])
    (tmp_path / "aside").rename(files[1])
    with pytest.raises(CorruptCheckpointError, match=r"keys affected: 'leaf"):
        await savestream.load(tmp_path / "step")
    with pytest.raises(CorruptCheckpointError) as caught:
        await savestream.verify(tmp_path / "step")
    problems = caught.value.problems
    assert {path.name for path in files if path.name in "".join(problems)} == {path.name for path in files[:2]}
    damaged = [key for key in state if repr(key) in "".join(problems)]
    assert len(damaged) == 2
    await check_the_rest(tmp_path / "step", state, damaged, problems=2)


@pytest.mark.parametrize("damage", ["missing", "truncated"])
async def test_keys_that_lie_elsewhere_load_although_an_object_is_lost(damage, tmp_path):
    state = {f"leaf{number}": np.full(1 << 20, number, np.int32) for number in range(4)}
    options = savestream.SaveOptions(memory_budget_bytes=4 << 20, compression="none", threads=1)
    await savestream.save(state, (SmallObjects(FileBackend(tmp_path)), "step"), options=options)
    lost = sorted((tmp_path / "step").glob("*/*.bin"))[2]
    lost.unlink() if damage == "missing" else lost.write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match=f"{lost.name}: {damage}.*keys affected: 'leaf.'") as caught:
        await savestream.load(tmp_path / "step")
    affected = [key for key in state if repr(key) in str(caught.value)]
    assert len(affected) == 1
    await check_the_rest(tmp_path / "step", state, affected)


async def test_what_lies_before_the_end_of_a_truncated_object_still_loads(tmp_path):
    state, opened = await saved(tmp_path / "step", "none")
    _, stop = frame_table(opened)[-1]
    with opened.data_path.open("r+b") as stream:
        stream.truncate(stop - 1)
    with pytest.raises(CorruptCheckpointError, match=r"truncated, .*keys affected: ") as caught:
        await savestream.load(tmp_path / "step")
    affected = [key for key in KEYS if repr(key) in str(caught.value)]
    assert affected
    assert set(affected) != set(KEYS)
    await check_the_rest(tmp_path / "step", state, affected)


async def test_verify_lists_all_damage_at_once(compression, tmp_path):
    _, opened = await saved(tmp_path / "step", compression)
    table = frame_table(opened)
    damaged = table[:: max(1, len(table) // 3)]
    for start, stop in damaged:
        Flipped(opened.data_path, (start + stop) // 2, 3).__enter__()
    with opened.data_path.open("ab") as stream:
        stream.write(b"more")
    with pytest.raises(CorruptCheckpointError, match=f"and {len(damaged)} more") as caught:
        await savestream.verify(tmp_path / "step")
    problems = caught.value.problems
    assert sorted(named_range(problem) for problem in problems if "damaged" in problem) == damaged
    assert sum("extended" in problem for problem in problems) == 1
    assert len(problems) == len(damaged) + 1


async def test_a_checkpoint_that_was_copied_elsewhere_is_as_good(compression, tmp_path):
    state, _ = await saved(tmp_path / "step", compression)
    shutil.copytree(tmp_path / "step", tmp_path / "copy")
    shutil.rmtree(tmp_path / "step")
    assert_same(await savestream.load(tmp_path / "copy"), state)
    report = await savestream.verify(tmp_path / "copy")
    assert report.raw_bytes == sum(state[key].nbytes for key in KEYS)


async def test_damage_goes_unseen_only_for_those_who_ask_for_it(tmp_path):
    """Checking is on by default; without it raw bytes come back as they are."""
    state, opened = await saved(tmp_path / "step", "none")
    start, stop = frame_table(opened)[0]
    with Flipped(opened.data_path, (start + stop) // 2, 1):
        with pytest.raises(CorruptCheckpointError):
            await savestream.load(tmp_path / "step")
        found = await savestream.load(tmp_path / "step", options=savestream.LoadOptions(verify_digests=False))
    different = [key for key in KEYS if found[key].tobytes() != state[key].tobytes()]
    assert len(different) == 1
