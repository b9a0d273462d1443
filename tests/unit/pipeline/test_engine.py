"""The engine: one loop for every caller, cancellation that waits, refusals with the cure, a clean exit."""

import asyncio
import concurrent.futures
import os
import subprocess
import sys
import threading

import anyio
import pytest

from savestream.errors import UsageError
from savestream.pipeline.engine import call, current_engine, submit


async def test_work_runs_on_the_engine_thread_and_its_result_comes_back():
    async def work():
        return threading.current_thread().name

    assert await call(work, "test") == "savestream-engine"
    assert threading.current_thread().name != "savestream-engine"


async def test_errors_come_back_as_they_are():
    error = ValueError("as it was")

    async def work():
        raise error

    with pytest.raises(ValueError, match="as it was") as caught:
        await call(work, "test")
    assert caught.value is error


async def test_nested_calls_run_in_place():
    async def inner():
        return current_engine().is_current_thread

    assert await call(lambda: call(inner, "inner"), "outer")


async def test_cancel_is_delivered_only_after_the_work_has_cleaned_up():
    started, cleaning, proceed = threading.Event(), threading.Event(), threading.Event()
    order = []

    async def work():
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                cleaning.set()
                await anyio.to_thread.run_sync(proceed.wait)
                order.append("cleaned")

    task = asyncio.create_task(call(work, "test"))
    await asyncio.to_thread(started.wait)
    task.cancel()
    await asyncio.to_thread(cleaning.wait)
    task.cancel()  # a second cancel does not cut the clean-up short either
    await asyncio.sleep(0)
    assert not task.done()
    proceed.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert order == ["cleaned"]


def test_cancelling_an_operation_from_a_thread():
    started = threading.Event()

    async def work():
        started.set()
        await anyio.sleep_forever()

    operation = submit(work, "test")
    started.wait()
    operation.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        operation.future.result()
    assert operation.future.cancelled()


def test_cancel_before_the_work_starts():
    gate = threading.Event()
    ran = []

    async def block():
        gate.wait()  # on purpose: holds the engine's loop, so that the next operation cannot start

    async def work():
        await anyio.sleep(0)
        ran.append(True)

    first = submit(block, "block")
    second = submit(work, "test")
    second.cancel()
    gate.set()
    first.future.result()
    with pytest.raises(concurrent.futures.CancelledError):
        second.future.result()
    assert not ran


def test_a_closed_loop_drops_nothing_and_two_loops_share_the_engine():
    async def work():
        return current_engine()

    async def main():
        return await call(work, "test")

    assert asyncio.run(main()) is asyncio.run(main())


def test_trio_is_refused_by_name():
    async def work():
        return None

    coroutine = call(work, "test")
    with pytest.raises(UsageError, match=r"trio\.to_thread\.run_sync"):
        coroutine.send(None)  # no asyncio loop runs here, as under trio


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_use_after_fork_is_refused_with_the_cure():
    script = """
import os, sys, warnings
from savestream.pipeline.engine import submit, current_engine
async def work(): return 1
assert submit(work, "parent").future.result() == 1
warnings.simplefilter("ignore", DeprecationWarning)
child = os.fork()
if child == 0:
    try:
        current_engine()
    except Exception as error:
        os._exit(0 if type(error).__name__ == "UsageError" and "spawn" in str(error) else 3)
    os._exit(4)
_, status = os.waitpid(child, 0)
assert submit(work, "parent").future.result() == 1
sys.exit(os.waitstatus_to_exitcode(status))
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_fork_before_first_use_works():
    script = """
import os, sys
from savestream.pipeline.engine import submit
async def work(): return 1
child = os.fork()
if child == 0:
    os._exit(0 if submit(work, "child").future.result() == 1 else 3)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_exit_waits_for_running_work_and_says_so():
    script = """
import logging, sys, anyio
logging.basicConfig(stream=sys.stderr)
from savestream.pipeline.engine import submit
async def work():
    await anyio.sleep(0.5)
    print("finished", flush=True)
submit(work, "test")
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout == "finished\n"
    assert "interpreter exit: waiting" in done.stderr


def test_exit_cancels_work_that_is_late_and_says_so():
    script = """
import logging, sys, anyio
logging.basicConfig(stream=sys.stderr)
from savestream.pipeline import engine
engine.EXIT_DEADLINE_SECONDS = 0.2
async def work():
    try:
        await anyio.sleep_forever()
    finally:
        print("cleaned", flush=True)
engine.submit(work, "test")
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout == "cleaned\n"
    assert "did not finish in time" in done.stderr


def test_nothing_starts_on_import():
    script = """
import threading
import savestream, savestream.blocking, savestream.pipeline.engine
assert threading.active_count() == 1
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
