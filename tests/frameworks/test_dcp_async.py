"""async_save with threads and with processes."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_support import assert_same_state, files_beneath, load, quiet, varied_state, zeroed
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import savestream.blocking
from savestream.integrations.torch import StorageReader, StorageWriter
from savestream.storage_backends.faults import Fault, FaultyBackend, Gate
from savestream.storage_backends.file import FileBackend

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning"),
]


def async_save(state: dict[str, Any], writer: Any, **options: Any) -> Future[Any]:
    with warnings.catch_warnings():
        quiet()
        future: Future[Any] = dcp.async_save(state, storage_writer=writer, **options)
    return future


def _mutate(state: Any) -> None:
    for value in state.values() if isinstance(state, dict) else state:
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                value.fill_(0)
        elif isinstance(value, dict | list):
            _mutate(value)


def test_what_happens_after_the_call_is_not_saved(tmp_path: Path) -> None:
    gate = Gate()
    backend = FaultyBackend(FileBackend(tmp_path), [Fault("open_writer", hook=gate)])
    state = varied_state()
    expected = varied_state()
    future = async_save(state, StorageWriter((backend, "c")))
    _mutate(state)
    assert not future.done()
    assert not savestream.blocking.exists(tmp_path / "c")
    gate.open()
    metadata = future.result(timeout=60)
    assert metadata.storage_meta.checkpoint_id.endswith("/c")
    assert_same_state(load(zeroed(expected), StorageReader(tmp_path / "c")), expected)


def test_conjugated_and_negated_tensors_are_staged_as_they_are_seen(tmp_path: Path) -> None:
    conjugated = torch.tensor([1 + 2j, 3 - 4j]).conj()
    base = torch.ones(1000)
    state = {"c": conjugated, "n": {"list": [conjugated.imag, base, base[:10]]}, "same": base}
    writer = StorageWriter(tmp_path / "c")
    assert isinstance(writer, dcp.staging.AsyncStager)
    async_save(state, writer).result(timeout=60)
    target = load(
        zeroed({"c": torch.zeros(2, dtype=torch.complex64), "n": state["n"], "same": base}),
        StorageReader(tmp_path / "c"),
    )
    assert_same_state(target, state)
    assert savestream.blocking.verify(tmp_path / "c").raw_bytes == 2 * 8 + 2 * 4 + 4000 + 40  # aliases survive staging


def test_saves_with_one_writer_at_once(tmp_path: Path) -> None:
    """Each in its thread, to its place; the first ones wait for the last one to have got as far."""
    barrier = threading.Barrier(3, timeout=30)

    def meet(_: object) -> None:
        barrier.wait()

    backend = FaultyBackend(FileBackend(tmp_path), [Fault("open_writer", hook=meet, times=3)])
    writer = StorageWriter((backend, "nowhere"))
    futures = [
        async_save({"x": torch.full((1000,), float(number))}, writer, checkpoint_id=f"c{number}") for number in range(3)
    ]
    for future in futures:
        future.result(timeout=60)
    for number in range(3):
        found = load({"x": torch.zeros(1000)}, StorageReader(tmp_path / f"c{number}"))
        assert torch.equal(found["x"], torch.full((1000,), float(number)))
    assert not (tmp_path / "nowhere").exists()


def test_a_failure_comes_with_the_future_and_leaves_nothing(tmp_path: Path) -> None:
    backend = FaultyBackend(FileBackend(tmp_path), [Fault("create", 28)])
    future = async_save({"x": torch.ones(1000)}, StorageWriter((backend, "c")))
    error = future.exception(timeout=60)
    assert isinstance(error, dcp.CheckpointException)
    assert "injected" in str(error)
    del future, error
    gc.collect()
    assert not files_beneath(tmp_path)
    async_save({"x": torch.ones(1000)}, StorageWriter((backend, "c"))).result(timeout=60)
    assert savestream.blocking.exists(tmp_path / "c")


# --- a process --------------------------------------------------------------------------------------------


@pytest.fixture
def _one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    _end_the_daemon()
    dist.destroy_process_group()


def _end_the_daemon() -> None:
    """torch keeps the process until it exits itself; a test has to leave none."""
    daemon, _async_process_executor._CHECKPOINT_PROCESS = _async_process_executor._CHECKPOINT_PROCESS, None
    if daemon is None:
        return
    child = psutil.Process(daemon._save_process.pid)
    daemon.__del__()
    daemon._save_process.join(timeout=30)
    daemon._process_pipe.close()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.usefixtures("_one_rank")
def test_a_process_saves(tmp_path: Path) -> None:
    """Several saves through one daemon: overwriting, a cached plan for another dtype, a failure in between."""
    save: Callable[..., Future[Any]] = dcp.async_save
    options = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    writer = StorageWriter(tmp_path / "c", overwrite=False)
    states: list[dict[str, Any]] = [
        {"x": torch.arange(1000.0), "step": 1, "deep": {"list": [torch.ones(3)]}},
        {"x": torch.arange(1000.0).bfloat16(), "step": 2, "deep": {"list": [torch.ones(3)]}},
    ]
    for number, state in enumerate(states):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        future = save(state, storage_writer=writer, checkpoint_id=tmp_path / f"c{number}", planner=planner, **options)
        expected = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
        state["x"].fill_(-1)
        metadata = future.result(timeout=120)
        assert metadata.state_dict_metadata["x"].properties.dtype is expected["x"].dtype
        target = dcp.state_dict_loader._load_state_dict_from_keys(storage_reader=StorageReader(tmp_path / f"c{number}"))
        assert_same_state(target, expected)
    with pytest.raises(dcp.CheckpointException, match="already there"):
        save(states[0], storage_writer=writer, checkpoint_id=tmp_path / "c0", **options).result(timeout=120)
    save(states[0], storage_writer=writer, checkpoint_id=tmp_path / "again", **options).result(timeout=120)
    assert savestream.blocking.exists(tmp_path / "again")
    with pytest.raises(savestream.UsageError, match="this process's memory"):
        save(states[0], storage_writer=StorageWriter("memory://a/b"), **options).result(timeout=120)
