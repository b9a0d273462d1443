"""The blocking facade: from plain code, from threads, across several loops, interrupted, and at interpreter exit."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from roundtrip_support import assert_same

import savestream
from savestream import blocking
from savestream.errors import CheckpointExistsError, UsageError

CHILDREN = str(pathlib.Path(__file__).with_name("facade_children.py"))


def state(number):
    return {"w": np.full((50, 30), number, np.float32), "nested": {"b": np.arange(number)}, "step": number}


def run_child(*arguments):
    """What the child printed; it must have ended well and said nothing else."""
    command = [sys.executable, "-W", "error", CHILDREN, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout.splitlines()


def test_every_function_from_plain_code(tmp_path):
    place = tmp_path / "step-000000000007"
    info = blocking.save(state(7), place, step=7, metrics={"loss": 0.5})
    assert info.step == 7
    assert_same(blocking.load(place), state(7))
    assert blocking.exists(place)
    assert blocking.read_manifest(place).metrics == {"loss": 0.5}
    assert [entry.step for entry in blocking.list_checkpoints(tmp_path)] == [7]
    assert dict(blocking.iter_arrays(place)).keys() == {"w", "nested.b"}
    assert blocking.verify(place).raw_bytes == 50 * 30 * 4 + 7 * 8
    with pytest.raises(CheckpointExistsError):
        blocking.save(state(8), place)
    handle = blocking.start_save(state(8), place, overwrite=True)
    handle.wait_staged()
    assert handle.result().save_id != info.save_id
    blocking.delete(place)
    assert not blocking.exists(place)


@pytest.mark.parametrize(
    "name", ["save", "start_save", "load", "read_manifest", "exists", "list_checkpoints", "delete", "verify"]
)
async def test_inside_a_coroutine_it_refuses_and_names_the_async_call(name, tmp_path):
    arguments = (state(1), tmp_path / "x") if "save" in name else (tmp_path / "x",)
    with pytest.raises(UsageError, match=rf"await savestream\.{name}\("):
        getattr(blocking, name)(*arguments)
    assert not (tmp_path / "x").exists()
    with pytest.raises(UsageError, match="iter_arrays"):
        next(blocking.iter_arrays(tmp_path / "x"))
    # From a worker thread of the same program it works, while the loop runs.
    await asyncio.to_thread(blocking.save, state(1), tmp_path / "x")
    assert_same(await savestream.load(tmp_path / "x"), state(1))


def test_several_event_loops_one_after_the_other_share_pool_and_plan_cache(tmp_path):
    with savestream.StagingPool(64 << 20) as pool:
        cache = savestream.PlanCache()
        options = savestream.SaveOptions(staging_pool=pool)
        for number in range(4):
            saving = savestream.save(state(7), tmp_path / str(number), options=options, plan_cache=cache)
            info = asyncio.run(saving)
            assert info.statistics.plan_cached == (number > 0)
        blocking.save(state(7), tmp_path / "blocking", options=options, plan_cache=cache)
        for name in ("0", "3", "blocking"):
            assert_same(asyncio.run(savestream.load(tmp_path / name)), state(7))
        assert pool.used_bytes == 0


def test_a_handle_outlives_the_loop_that_made_it(tmp_path):
    handle = asyncio.run(savestream.start_save(state(3), tmp_path / "step"))

    async def wait():
        return await handle

    assert asyncio.run(wait()).location == handle.result().location
    assert_same(blocking.load(tmp_path / "step"), state(3))


def test_four_threads_at_once_into_different_steps(tmp_path):
    start = threading.Barrier(4)
    failures = []

    def work(number):
        try:
            start.wait(30)
            for step in range(5):
                place = tmp_path / f"step-{10 * number + step:012d}"
                blocking.save(state(10 * number + step), place)
                assert_same(blocking.load(place), state(10 * number + step))
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert len(blocking.list_checkpoints(tmp_path)) == 20


def test_threads_with_loops_of_their_own(tmp_path):
    results = {}

    def work(number):
        results[number] = asyncio.run(savestream.save(state(number), tmp_path / str(number)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [0, 1, 2, 3]
    for number in results:
        assert_same(blocking.load(tmp_path / str(number)), state(number))


def test_the_first_save_of_a_process_may_come_from_a_thread(tmp_path):
    assert run_child("first_save_from_a_thread", tmp_path / "step") == ["2.0"]


@pytest.mark.skipif(os.name == "nt", reason="sends itself SIGINT")
@pytest.mark.parametrize("kind", ["open_writer", "write", "finish", "put", "create"])
def test_an_interrupted_save_leaves_nothing_or_all(kind, tmp_path):
    outcome, files, found, again = run_child("interrupt_during", tmp_path / "step", kind, "fresh")
    assert outcome == "interrupted"
    assert again == "1.0"
    if kind == "create":  # the commit had been sent
        assert found == "2.0"
    else:
        assert (files, found) == ("[]", "None")


@pytest.mark.skipif(os.name == "nt", reason="sends itself SIGINT")
@pytest.mark.parametrize("kind", ["write", "put", "replace", "delete"])
def test_an_interrupted_overwrite_leaves_the_old_or_the_new_checkpoint(kind, tmp_path):
    outcome, files, found, again = run_child("interrupt_during", tmp_path / "step", kind, "overwrite")
    assert outcome == "interrupted"
    assert found == ("2.0" if kind in ("replace", "delete") else "1.0")
    assert files.count(",") == 1, "one manifest and one save's directory"
    assert again == "1.0"


@pytest.mark.skipif(os.name == "nt", reason="sends itself SIGINT")
def test_an_interrupted_load(tmp_path):
    assert run_child("interrupt_load", tmp_path / "step") == ["interrupted False", "2.0"]


@pytest.mark.parametrize("way", ["save_before_exit", "save_in_a_thread_at_exit"])
def test_a_save_that_is_under_way_at_exit_is_finished(way, tmp_path):
    assert run_child(way, tmp_path / "step") == []
    assert blocking.load(tmp_path / "step")["w"].tolist() == [2.0] * 200_000


def test_no_signal_handler_is_installed(tmp_path):
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    blocking.save(state(1), tmp_path / "step")
    assert [signal.getsignal(number) for number in numbers] == before


def test_no_event_loop_is_patched_or_left_behind(tmp_path):
    run_before = asyncio.run
    blocking.save(state(1), tmp_path / "step")
    assert asyncio.run is run_before
    with pytest.raises(RuntimeError, match="no running event loop"):
        asyncio.get_running_loop()
