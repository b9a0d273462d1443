"""Which combinations of the long sweeps belong to the light suite; the others are marked slow."""

from __future__ import annotations

import pytest

LIGHT = {
    "test_any_operation_of_a_save_may_fail": {
        "file-save-True",
        "file-lazy-False",
        "memory-save-False",
        "memory-eager-True",
    },
    "test_any_operation_of_a_load_may_fail": {"target-file", "new-memory"},
    "test_cancelling_the_awaiting_task_at_every_operation": {"file-fresh", "memory-overwrite"},
    "test_cancelling_start_save_ends_the_save_and_cancelling_an_await_of_its_handle_does_not": {
        "file-eager",
        "memory-lazy",
    },
    "test_handle_cancel_at_every_operation": {"lazy-file", "eager-memory"},
    "test_a_save_that_is_too_slow_ends_with_a_timeout_of_its_own": {"save-file", "lazy-memory"},
    "test_cancelling_a_load_at_every_operation": {"target-file", "new-memory"},
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        light = LIGHT.get(item.originalname) if isinstance(item, pytest.Function) else None
        if light is not None and item.callspec.id not in light:
            item.add_marker(pytest.mark.slow)
