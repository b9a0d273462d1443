"""Staging memory: alignment, reuse, the limit, and a budget that cannot deadlock."""

import gc
import weakref

import anyio
import numpy as np
import pytest

from savestream.errors import PlanError, UsageError
from savestream.pipeline.buffers import PAGE_BYTES, StagingPool, aligned_bytes, allocate_array

MEBIBYTE = 2**20


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 5 * MEBIBYTE + 3])
def test_memory_starts_on_a_page(nbytes):
    memory = aligned_bytes(nbytes)
    assert memory.nbytes == nbytes
    assert memory.ctypes.data % PAGE_BYTES == 0
    assert not memory.any()


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (1024, 1025)])
@pytest.mark.parametrize("dtype", ["float32", ">u2", "M8[ns]"])
def test_results_are_ordinary_writable_arrays(shape, dtype):
    array = allocate_array(np.dtype(dtype), shape)
    assert array.shape == shape
    assert array.dtype == np.dtype(dtype)
    assert array.flags.writeable
    assert array.flags.c_contiguous
    if array.nbytes >= 2 * MEBIBYTE:
        assert array.ctypes.data % PAGE_BYTES == 0


def test_a_returned_buffer_is_the_next_one():
    pool = StagingPool(4 * MEBIBYTE)
    buffer = pool.take(MEBIBYTE)
    pool.give(buffer)
    assert pool.take(MEBIBYTE) is buffer
    assert pool.take(MEBIBYTE) is not buffer


def test_other_capacities_make_room():
    pool = StagingPool(4 * MEBIBYTE)
    old = [weakref.ref(buffer) for buffer in [pool.take(MEBIBYTE) for _ in range(4)] if pool.give(buffer) is None]
    gc.collect()
    assert all(reference() is not None for reference in old)
    pool.take(3 * MEBIBYTE)
    gc.collect()
    assert sum(reference() is not None for reference in old) == 1


def test_a_dropped_buffer_no_longer_counts():
    pool = StagingPool(2 * MEBIBYTE)
    for _ in range(5):
        pool.take(2 * MEBIBYTE)  # dropped, as by a cancelled save
        gc.collect()
    kept = pool.take(MEBIBYTE)
    pool.give(kept)
    assert pool.take(MEBIBYTE) is kept


def test_a_pool_that_is_forgotten_is_freed():
    pool = StagingPool(2 * MEBIBYTE)
    pool.give(pool.take(MEBIBYTE))
    reference = weakref.ref(pool)
    del pool
    gc.collect()
    assert reference() is None


def test_prefault_fills_the_pool_once():
    pool = StagingPool(4 * MEBIBYTE)
    pool.prefault(3 * MEBIBYTE, MEBIBYTE)
    buffers = {id(pool.take(MEBIBYTE)) for _ in range(3)}
    assert len(buffers) == 3


def test_a_closed_pool_refuses_and_takes_back():
    with StagingPool(2 * MEBIBYTE) as pool:
        buffer = pool.take(MEBIBYTE)
    pool.give(buffer)
    pool.close()
    with pytest.raises(UsageError, match="closed"):
        pool.take(MEBIBYTE)


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "1"])
def test_a_limit_is_a_positive_number_of_bytes(limit):
    with pytest.raises(PlanError, match="limit_bytes"):
        StagingPool(limit)


async def test_reservations_wait_their_turn_first_come_first_served():
    pool = StagingPool(10)
    order = []

    async def work(name, nbytes, hold):
        async with pool.reserve(nbytes):
            order.append(name)
            await hold.wait()

    first, rest = anyio.Event(), anyio.Event()
    rest.set()
    async with anyio.create_task_group() as group:
        group.start_soon(work, "a", 8, first)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(work, "b", 9, rest)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(work, "c", 1, rest)  # would fit, but is not let past
        await anyio.wait_all_tasks_blocked()
        assert order == ["a"]
        first.set()
    assert order == ["a", "b", "c"]
    assert pool.used_bytes == 0


async def test_more_than_the_limit_is_admitted_alone():
    pool = StagingPool(10)
    async with pool.reserve(1000):
        assert pool.used_bytes == 1000
    assert pool.used_bytes == 0


@pytest.mark.parametrize("sizes", [[64] * 64, list(range(1, 65)), [3, 200, 5, 150, 7]])
async def test_every_reservation_is_served_in_the_end(sizes):
    pool = StagingPool(100)
    served = []

    async def work(nbytes):
        async with pool.reserve(nbytes):
            assert pool.used_bytes <= 100 or pool.used_bytes == nbytes
            await anyio.lowlevel.checkpoint()
            served.append(nbytes)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            for nbytes in sizes:
                group.start_soon(work, nbytes)
    assert sorted(served) == sorted(sizes)


async def test_a_cancelled_wait_gives_its_place_away():
    pool = StagingPool(10)
    served = anyio.Event()

    async def wait(nbytes):
        async with pool.reserve(nbytes):
            served.set()

    async with anyio.create_task_group() as group, pool.reserve(5):
        async with anyio.create_task_group() as waiting:
            waiting.start_soon(wait, 10)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(wait, 5)
            await anyio.wait_all_tasks_blocked()
            assert not served.is_set()
            waiting.cancel_scope.cancel()
        with anyio.fail_after(30):
            await served.wait()
    assert pool.used_bytes == 0
