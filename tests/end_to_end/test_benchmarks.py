"""The benchmark commands run, measure every system that is installed, and name those that are not."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parents[2]
ROUNDS = 2

FLOORS = {"floor: copy, 2 threads", "floor: direct write, 2 threads", "floor: direct read, 4 threads"}
OWN = {"savestream: save", "savestream: load into target", "savestream: load new"}
PEERS = {
    "DCP": {"save", "load into target"},
    "torch.save": {"save", "load new"},
    "torchsnapshot": {"save", "load into target"},
}
STALL = {"savestream: start_save stall, warm pool", "savestream: start_save until durable"}
SMALL = {
    *(f"savestream, 4x the leaves: {name}" for name in ("save", "load into target", "load new")),
    "savestream: save, plan cached",
    "savestream: planning within it",
    "savestream: replan of an unchanged state",
}
MEMORY = {f"savestream{codec}: {name}" for codec in ("", " zstd") for name in ("save", "load into target")}


def run_benchmark(tmp_path: Path, command: str) -> tuple[dict[str, Any], str]:
    result = tmp_path / "result.json"
    arguments = [command, "--quick", "--rounds", str(ROUNDS), "--root", str(tmp_path / "data"), "--json", str(result)]
    outcome = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert list((tmp_path / "data").iterdir()) == []  # it cleans up
    return json.loads(result.read_text(encoding="utf-8")), outcome.stdout


def measured_peers(report: dict[str, Any], text: str, names: set[str]) -> set[str]:
    """The peers that must have samples: those that are not reported absent, which needs a reason."""
    assert set(report["absent"]) <= names
    if importlib.util.find_spec("torch") is None:
        assert set(report["absent"]) == names
    else:
        assert set(report["absent"]) <= {"torchsnapshot"}
    for name, reason in report["absent"].items():
        assert reason
        assert f"{name} is not measured: " in text
    return names - set(report["absent"])


def check_samples(report: dict[str, Any], expected: set[str]) -> None:
    assert set(report["samples"]) == expected
    for name, values in report["samples"].items():
        assert len(values) == ROUNDS, name
        assert all(value > 0 for value in values), name


def check_conclusions(report: dict[str, Any], text: str) -> None:
    """Every ratio follows from the samples beside it, and every goal is printed with its verdict."""
    for ratio in report["ratios"]:
        above, below = report["samples"][ratio["numerator"]], report["samples"][ratio["denominator"]]
        quotients = sorted(a / b for a, b in zip(above, below, strict=True))
        assert ratio["value"] == pytest.approx(sum(quotients) / 2)
        assert ratio["low"] <= ratio["value"] <= ratio["high"]
    for goal in report["goals"]:
        verdict = "holds" if goal["holds"] else "does not hold"
        assert f"goal {verdict}: {goal['text']}" in text


def test_large(tmp_path: Path) -> None:
    report, text = run_benchmark(tmp_path, "large")
    peers = measured_peers(report, text, set(PEERS))
    check_samples(report, FLOORS | OWN | STALL | {f"{peer}: {name}" for peer in peers for name in PEERS[peer]})
    check_conclusions(report, text)
    goals = {goal["text"]: goal for goal in report["goals"]}
    assert "warm stall over a two-thread copy" in goals
    assert ("durable save, times as fast as DCP" in goals) == ("DCP" in peers)
    assert set(report["stages"]) == {"save", "load into target", "load new"}


def test_small(tmp_path: Path) -> None:
    report, text = run_benchmark(tmp_path, "small")
    peers = measured_peers(report, text, set(PEERS))
    names = {f"{peer}: {name}" for peer in peers for name in PEERS[peer]}
    replan = {"DCP: replan of an unchanged state"} if "DCP" in peers else set()
    check_samples(report, OWN | SMALL | names | replan)
    check_conclusions(report, text)
    assert len(report["goals"]) == 3
    assert "files of a checkpoint of 500 arrays: 3" in text  # root, part, data


def test_memory(tmp_path: Path) -> None:
    report, text = run_benchmark(tmp_path, "memory")
    peers = measured_peers(report, text, {"DCP"})
    check_samples(report, MEMORY | {f"{peer}: {name}" for peer in peers for name in PEERS[peer]})
    check_conclusions(report, text)
    assert len(report["goals"]) == len(MEMORY)


def test_a_wrong_command_line_is_refused() -> None:
    command = [sys.executable, "-m", "benchmarks", "large", "--rounds", "-1"]
    outcome = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=60, check=False)
    assert outcome.returncode == 2
    assert "--rounds must be at least 1" in outcome.stderr
