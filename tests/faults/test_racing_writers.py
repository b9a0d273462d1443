"""Two processes save different trees to one place at the same moment, without any coordination."""

from __future__ import annotations

import asyncio
import multiprocessing
import pathlib

import pytest
from fault_support import assert_same, make_state
from racing_children import race, racing_state

import savestream
from savestream import blocking
from savestream.errors import CheckpointExistsError
from savestream.storage_backends import Fault, FaultyBackend, FileBackend, Gate, MemoryBackend

ROUNDS = 60


def run_race(root, rounds, *, overwrite):
    """What each of the two said in each round: ``{round: {writer: (save_id or None, message)}}``."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.SimpleQueue()
    racers = [
        context.Process(target=race, args=(writer, str(root), rounds, barrier, results, overwrite)) for writer in (0, 1)
    ]
    for racer in racers:
        racer.start()
    said = {number: {} for number in range(rounds)}
    for _ in range(2 * rounds):
        number, writer, save_id, message = results.get()
        said[number][writer] = (save_id, message)
    for racer in racers:
        racer.join(60)
        assert racer.exitcode == 0
    return said


def check_place(place, number):
    """The checkpoint is whole and one writer's; return which writer's."""
    state = blocking.load(place)
    assert_same(state, racing_state(state["writer"], number))
    blocking.verify(place)
    return state["writer"]


def test_exactly_one_of_two_racing_processes_wins(tmp_path):
    said = run_race(tmp_path, ROUNDS, overwrite=False)
    for number in range(ROUNDS):
        place = tmp_path / f"round{number}"
        won = [writer for writer, (save_id, _) in said[number].items() if save_id is not None]
        assert len(won) == 1, f"round {number}: {said[number]}"
        message = said[number][1 - won[0]][1]
        assert "overwrite=True" in message
        assert place.name in message
        assert check_place(place, number) == won[0]
        left = {path.name for path in place.iterdir()}
        assert left == {"manifest.json", said[number][won[0]][0]}, "the loser's files are still there"


def test_racing_overwrites_leave_one_writers_state(tmp_path):
    rounds = 10
    said = run_race(tmp_path, rounds, overwrite=True)
    for number in range(rounds):
        place = tmp_path / f"round{number}"
        won = [writer for writer, (save_id, _) in said[number].items() if save_id is not None]
        assert won, said[number]
        assert all("another save" in message for save_id, message in said[number].values() if save_id is None)
        winner = check_place(place, number)
        assert winner in won
        assert {path.name for path in place.iterdir() if path.is_file()} == {"manifest.json"}


@pytest.mark.parametrize("kind", ["file", "memory"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["fresh", "overwrite"])
async def test_a_commit_in_between_is_noticed_at_the_last_moment(kind, overwrite, tmp_path):
    """One save is stopped just before its commit; another one to the same place goes through meanwhile."""
    plain = FileBackend(tmp_path / "store") if kind == "file" else MemoryBackend()
    if overwrite:
        await savestream.save(make_state(0), (plain, "place"))
    gate = Gate()
    slow = FaultyBackend(plain, [Fault("replace" if overwrite else "create", None, hook=gate)])
    late = asyncio.create_task(savestream.save(make_state(1), (slow, "place"), overwrite=overwrite))
    await gate.reached()
    info = await savestream.save(make_state(2), (plain, "place"), overwrite=overwrite)
    gate.open()
    with pytest.raises(CheckpointExistsError, match="another save committed here first"):
        await late
    assert_same(await savestream.load((plain, "place")), make_state(2))
    await savestream.verify((plain, "place"))
    found = await plain.list_objects("place")
    assert {pathlib.PurePath(entry.path).parts[1] for entry in found} == {"manifest.json", info.save_id}


@pytest.mark.parametrize("kind", ["file", "memory"])
async def test_a_destination_in_use_is_refused_before_anything_is_staged(kind, tmp_path):
    plain = FileBackend(tmp_path / "store") if kind == "file" else MemoryBackend()
    await savestream.save(make_state(0), (plain, "place"))
    untouchable = FaultyBackend(plain, [Fault("open_writer", AssertionError("staged"), times=None)])
    for save in (savestream.save, savestream.start_save):
        with pytest.raises(CheckpointExistsError, match=r"place.*overwrite=True") as caught:
            await save(make_state(1), (untouchable, "place"))
        assert isinstance(caught.value, FileExistsError)
    await savestream.save(make_state(1), (plain, "place"), overwrite=True)
    assert_same(await savestream.load((plain, "place")), make_state(1))


async def test_concurrent_saves_of_one_process_have_one_winner_too(tmp_path):
    for number in range(10):
        place = tmp_path / str(number)
        saves = [savestream.save(racing_state(writer, number), place) for writer in range(4)]
        results = await asyncio.gather(*saves, return_exceptions=True)
        won = [writer for writer, result in enumerate(results) if isinstance(result, savestream.CheckpointInfo)]
        assert len(won) == 1
        assert sum(isinstance(result, CheckpointExistsError) for result in results) == 3
        assert_same(await savestream.load(place), racing_state(won[0], number))
        assert {path.name for path in place.iterdir()} == {"manifest.json", results[won[0]].save_id}
