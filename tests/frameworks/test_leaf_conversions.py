"""Loads with cast=True convert numbers as the frameworks themselves do."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
from leaf_dtypes import BY_STORED, NARROWER, WIDER, LeafDtype, random_memory
from leaf_layouts import host_array, jax_array, torch_tensor
from leaf_targets import MODES, assert_values, host_elements, make_target

from savestream import blocking
from savestream.storage_backends import MemoryBackend

CONVERSIONS = [
    (source, target) for table in (WIDER, NARROWER) for source, target in table.items() if not source.startswith(">")
] + [("float32", "int32"), ("int64", "float32"), ("bool", "float16"), ("float32", "complex64"), ("uint8", "bool")]


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_conversions_are_those_of_the_framework(framework: str) -> None:
    known, generator = BY_STORED[framework], np.random.default_rng(0)
    pairs = [(known[a], known[b]) for a, b in CONVERSIONS if a in known and b in known and can_convert(framework, a, b)]
    sources = [in_range(source, target, generator) for source, target in pairs]
    names = [f"{source.name} to {target.name}" for source, target in pairs]
    place = (MemoryBackend("test"), "checkpoint")
    blocking.save(dict(zip(names, sources, strict=True)), place)
    mode = next(mode for mode in MODES if mode.kind == "wider" and mode.framework == framework)
    targets = [make_target(source.shape, target, mode) for source, (_, target) in zip(sources, pairs, strict=True)]
    found = blocking.load(place, dict(zip(names, targets, strict=True)), cast=True)
    assert len(pairs) > 25
    for name, elements, (source, target) in zip(names, sources, pairs, strict=True):
        assert_values(found[name], converted(framework, elements, source, target), target)


def can_convert(framework: str, source: str, target: str) -> bool:
    """torch itself converts nothing from or to types of less than a byte."""
    packed = {"int1", "int2", "int4", "uint1", "uint2", "uint4"}
    return framework != "torch" or not packed & {source, target}


def in_range(source: LeafDtype, target: LeafDtype, generator: np.random.Generator) -> np.ndarray:
    """Numbers that every framework converts alike.

    Beyond the largest finite number of float8_e4m3fn torch gives that, numpy nan; beyond the integers all is
    undefined; and XLA takes subnormal numbers for zero.
    """
    elements = host_array(random_memory(source, generator, 3000), source, (3000,))
    with np.errstate(all="ignore"):
        wide = elements.astype(np.clongdouble if source.is_complex else np.longdouble)
        parts = np.abs(np.stack([wide.real, wide.imag]))
        usual = ((parts > 2e-38) | (parts == 0) | ~np.isfinite(parts)).all(axis=0)
        if target.stored == "float8_e4m3fn":
            usual &= parts[0] < 448
        if target.stored == "float4_e2m1fn":  # which has no nan
            usual &= ~np.isnan(parts[0])
        if target.host.kind in "iu" and source.is_floating:
            usual &= parts[0] < 2**31
    return elements[usual]


def converted(framework: str, elements: np.ndarray, source: LeafDtype, target: LeafDtype) -> np.ndarray:
    if framework == "torch":
        memory = elements.view(np.uint8)
        return host_elements(torch_tensor(memory, source, elements.shape).to(getattr(torch, target.name)), target)
    with jax.enable_x64(True):
        return np.asarray(jax_array(elements, source).astype(target.name))
