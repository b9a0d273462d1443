"""Objects of frameworks, and random generators, as plain values: a type name and a plain state.

The types are a fixed table. A file only names an entry of it: nothing is imported by a name that a file holds, and an
object is made only where the caller has imported its framework. Elsewhere
:class:`~savestream.planners.recorded.RecordedObject` stands for it.
"""

from __future__ import annotations

import abc
import functools
import re
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from savestream.arrays import dtype_from_name, dtype_name
from savestream.errors import SavestreamError

__all__ = ["ObjectForm", "ObjectUnavailableError", "form_by_name", "form_of", "require_state"]

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,60}")
_DEVICE = re.compile(r"[a-z]{1,20}(:[0-9]{1,4})?")


class ObjectUnavailableError(Exception):
    """A recorded object cannot be made here: its framework is not imported, or does not know it."""


def require_state(condition: bool, what: str) -> None:
    """Refuse a recorded state that no object has."""
    if not condition:
        raise ValueError(what)


class ObjectForm(abc.ABC):
    """How objects of one class are recorded.

    Attributes
    ----------
    name
        The recorded type name.
    module
        The module that has to be imported already; its root finds the form quickly.
    keeps_identity
        Whether a load sets the state of the target's object instead of replacing it.
    """

    name: str
    module: str
    keeps_identity = False

    @abc.abstractmethod
    def matches(self, value: object) -> bool:
        """Whether ``value`` is recorded in this form."""

    @abc.abstractmethod
    def state(self, value: Any) -> object:
        """A plain value that determines the object; ``UnsafeObjectError`` (without a key) where there is none."""

    @abc.abstractmethod
    def check(self, state: Any) -> None:
        """Raise ``ValueError``, ``TypeError`` or ``LookupError`` for a state that :meth:`state` never returns."""

    @abc.abstractmethod
    def make(self, state: Any) -> object:
        """The object of a checked state, or ``ObjectUnavailableError``."""

    def difference(self, target: Any, saved: Any) -> str | None:
        """Why the state of ``saved`` does not fit into ``target``, both of this form; None where it does."""
        del target, saved
        return None

    def adopt(self, target: Any, saved: Any) -> None:
        """Give ``target`` the state of ``saved``."""
        raise NotImplementedError(f"{self.name} objects are replaced, {target!r} by {saved!r}")

    def loaded(self) -> Any:
        """The framework's module."""
        module = sys.modules.get(self.module)
        if module is None:
            raise ObjectUnavailableError(f"{self.module} is not imported")
        return module


class _NamedConstant(ObjectForm):
    """Constants in torch's own namespace, such as ``torch.float32``."""

    module = "torch"

    def __init__(self, name: str) -> None:
        self.name = f"torch.{name}"
        self._class = name

    def matches(self, value: object) -> bool:
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

    def matches(self, value: object) -> bool:
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

    def matches(self, value: object) -> bool:
        kind = getattr(sys.modules.get("torch"), "Size", None)
        return type(value) is kind and all(type(size) is int for size in value)  # type: ignore[attr-defined]

    def state(self, value: Any) -> object:
        return list(value)

    def check(self, state: Any) -> None:
        valid = type(state) is list and all(type(size) is int and -(2**63) <= size < 2**63 for size in state)
        require_state(valid, "not a list of sizes")

    def make(self, state: Any) -> object:
        return self.loaded().Size(state)


class _NumpyScalarType(ObjectForm):
    """numpy's and ml_dtypes' classes of scalars themselves, such as ``numpy.float32``."""

    name = "numpy.scalar_type"
    module = "numpy"

    def matches(self, value: object) -> bool:
        if not (isinstance(value, type) and issubclass(value, np.generic)) or value in _ABSTRACT:
            return False
        try:
            return dtype_from_name(dtype_name(np.dtype(value))).type is value
        except (SavestreamError, TypeError):  # one that holds Python objects, or has no name of its own
            return False

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

    def matches(self, value: object) -> bool:
        return isinstance(value, type) and type(value) is not type and value in self._known().values()

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
        module = sys.modules.get(self.module)
        meta = type(getattr(module, "float32", None))
        if module is None or not issubclass(meta, type):
            return {}
        return {kind.dtype.name: kind for kind in list(vars(module).values()) if type(kind) is meta}


@functools.cache
def _forms() -> Mapping[str, ObjectForm]:
    from savestream.planners.random_generators import GENERATOR_FORMS

    constants = [_NamedConstant(name) for name in ("dtype", "layout", "memory_format", "qscheme")]
    forms = [*constants, _Device(), _Size(), _NumpyScalarType(), _JaxScalarType(), *GENERATOR_FORMS]
    return {form.name: form for form in forms}


@functools.cache
def _forms_by_root() -> Mapping[str, list[ObjectForm]]:
    found: dict[str, list[ObjectForm]] = {}
    for form in _forms().values():
        found.setdefault(form.module.partition(".")[0], []).append(form)
    return found


def form_by_name(name: str) -> ObjectForm | None:
    """The form of a recorded type name, or None where this version knows none."""
    return _forms().get(name)


def form_of(value: object) -> ObjectForm | None:
    """The form in which an object is recorded, or None."""
    kind = value if isinstance(value, type) else type(value)
    root = kind.__module__.partition(".")[0]
    forms = _forms_by_root().get("numpy" if root == "ml_dtypes" else root, ())
    return next((form for form in forms if form.matches(value)), None)
