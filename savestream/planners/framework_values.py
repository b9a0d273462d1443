"""Objects of frameworks, and random generators, as plain values: a type name and a plain state.

The types are a fixed table. A file only names an entry of it: nothing is imported by a name that a file holds, and an
object is made only where the caller has imported its framework. Elsewhere
:class:`~savestream.planners.recorded.RecordedObject` stands for it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from savestream.arrays import dtype_from_name, dtype_name
from savestream.errors import SavestreamError
from savestream.planners.object_forms import ObjectForm, ObjectUnavailableError, require_state
from savestream.planners.random_generators import GENERATOR_FORMS
from savestream.planners.recorded import RecordedObject

__all__ = ["adopting_form", "adoption_problem", "dtype_round_trips", "form_by_name", "form_of"]

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,60}")
_DEVICE = re.compile(r"[a-z]{1,20}(:[0-9]{1,4})?")


def dtype_round_trips(dtype: np.dtype[Any], kind: type) -> bool:
    """Whether the name of a dtype leads back to it and to its class of scalars."""
    if dtype.hasobject or dtype.type is not kind or dtype.metadata:
        return False
    try:
        found = dtype_from_name(dtype_name(dtype))
    except SavestreamError:
        return False
    return found == dtype and found.type is kind


class _NamedConstant(ObjectForm):
    """Constants in torch's own namespace, such as ``torch.float32``."""

    module = "torch"

    def __init__(self, name: str) -> None:
        self.name = f"torch.{name}"
        self._class = name

    def matches(self, value: Any) -> bool:
        return type(value) is getattr(sys.modules.get("torch"), self._class, None)

    def state(self, value: Any) -> object:
        return str(value).removeprefix("torch.")

    def check(self, state: Any) -> None:
        require_state(type(state) is str and _WORD.fullmatch(state) is not None, "not the name of a constant")

    def make(self, state: Any) -> object:
        torch = self.loaded()
        value = vars(torch).get(state)  # a look-up by getattr could import a module
        if type(value) is not getattr(torch, self._class):
            raise ObjectUnavailableError(f"torch has no {self._class} {state}")
        return value


class _Device(ObjectForm):
    name = "torch.device"
    module = "torch"

    def matches(self, value: Any) -> bool:
        return type(value) is getattr(sys.modules.get("torch"), "device", None)

    def state(self, value: Any) -> object:
        return str(value)

    def check(self, state: Any) -> None:
        require_state(type(state) is str and _DEVICE.fullmatch(state) is not None, "not a device")

    def make(self, state: Any) -> object:
        try:
            return self.loaded().device(state)
        except RuntimeError as error:
            raise ObjectUnavailableError(f"torch has no device {state}") from error


class _Size(ObjectForm):
    name = "torch.Size"
    module = "torch"

    def matches(self, value: Any) -> bool:
        kind = getattr(sys.modules.get("torch"), "Size", None)
        return type(value) is kind and all(type(size) is int for size in value)

    def state(self, value: Any) -> object:
        return tuple(value)

    def check(self, state: Any) -> None:
        valid = type(state) is tuple and all(type(size) is int and -(2**63) <= size < 2**63 for size in state)
        require_state(valid, "not a tuple of sizes")

    def make(self, state: Any) -> object:
        return self.loaded().Size(state)


class _NumpyScalarType(ObjectForm):
    """numpy's and ml_dtypes' classes of scalars themselves, such as ``numpy.float32``."""

    name = "numpy.scalar_type"
    module = "numpy"

    def matches(self, value: Any) -> bool:
        if not (isinstance(value, type) and issubclass(value, np.generic)) or value in _ABSTRACT:
            return False
        return dtype_round_trips(np.dtype(value), value)

    def state(self, value: Any) -> object:
        return dtype_name(np.dtype(value))

    def check(self, state: Any) -> None:
        require_state(type(state) is str and self.state(dtype_from_name(state).type) == state, "not a scalar type")

    def make(self, state: Any) -> object:
        return dtype_from_name(state).type


_ABSTRACT: frozenset[type] = frozenset(
    {
        *(np.generic, np.number, np.integer, np.signedinteger, np.unsignedinteger, np.inexact),
        *(np.floating, np.complexfloating, np.flexible, np.character),
    }
)


class _JaxScalarType(ObjectForm):
    """The scalar types in ``jax.numpy``, such as ``jax.numpy.float32``, which are no classes of numpy's."""

    name = "jax.numpy.scalar_type"
    module = "jax.numpy"

    def matches(self, value: Any) -> bool:
        return type(value) is not type and value in self._known().values()

    def state(self, value: Any) -> object:
        return str(value.dtype.name)

    def check(self, state: Any) -> None:
        require_state(type(state) is str and _WORD.fullmatch(state) is not None, "not the name of a dtype")

    def make(self, state: Any) -> object:
        self.loaded()
        try:
            return self._known()[state]
        except KeyError:
            raise ObjectUnavailableError(f"jax.numpy has no scalar type of dtype {state}") from None

    def _known(self) -> Mapping[str, Any]:
        names: dict[str, Any] = vars(sys.modules[self.module]) if self.module in sys.modules else {}
        meta = type(names.get("float32"))
        found: list[Any] = [kind for kind in list(names.values()) if type(kind) is meta and issubclass(meta, type)]
        return {kind.dtype.name: kind for kind in found}


_FORMS: Mapping[str, ObjectForm] = MappingProxyType(
    {
        form.name: form
        for form in (
            *map(_NamedConstant, ("dtype", "layout", "memory_format", "qscheme")),
            *(_Device(), _Size(), _NumpyScalarType(), _JaxScalarType(), *GENERATOR_FORMS),
        )
    }
)
_ROOTS = {"ml_dtypes": "numpy"}  # whose scalar types are found with numpy's
_FORMS_BY_ROOT: Mapping[str, tuple[ObjectForm, ...]] = MappingProxyType(
    {root: tuple(form for form in _FORMS.values() if form.root == root) for root in {f.root for f in _FORMS.values()}}
)


def form_by_name(name: str) -> ObjectForm | None:
    """The form of a recorded type name, or None where this version knows none."""
    return _FORMS.get(name)


def form_of(value: object) -> ObjectForm | None:
    """The form in which an object is recorded, or None."""
    kind = value if isinstance(value, type) else type(value)
    root = kind.__module__.partition(".")[0]
    return next((form for form in _FORMS_BY_ROOT.get(_ROOTS.get(root, root), ()) if form.matches(value)), None)


def adopting_form(target: object) -> ObjectForm | None:
    """The form of an object that a load does not replace, but gives the saved state: a random generator."""
    form = form_of(target)
    return form if form is not None and form.keeps_identity else None


def adoption_problem(target: object, saved: object) -> str | None:
    """Why such an object cannot take over the state of the saved one; None where it can, or is replaced anyway."""
    form = adopting_form(target)
    if form is None:
        return None
    if form_of(saved) is not form:
        return f"the checkpoint has {_described(saved)}, whose state the target, a {form.name}, cannot take over"
    return form.difference(target, saved)


def _described(saved: object) -> str:
    name = saved.type_name if isinstance(saved, RecordedObject) else type(saved).__name__
    return "None" if saved is None else f"a {name}"
