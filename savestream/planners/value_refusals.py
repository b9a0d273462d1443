"""What is said of a value that has no safe encoding, and the pickling of one for which the caller opted in."""

from __future__ import annotations

import functools
import pickle  # only behind the explicit opt-in of the caller
import types

from savestream.arrays import array_refusal
from savestream.errors import UnsafeObjectError

__all__ = ["describe_type", "pickle_object", "refusal"]

_BASES = (dict, list, tuple, str, bytes, int, float, set, frozenset)
_CODE = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType),
    *(functools.partial, types.CodeType, types.GeneratorType, types.CoroutineType, types.ModuleType),
)


def describe_type(value: object) -> str:
    """The full class name of ``value``, for messages."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def refusal(value: object, key: str) -> UnsafeObjectError:
    """The error for an object that has no safe encoding."""
    unsupported = array_refusal(value)
    if unsupported is not None:
        return UnsafeObjectError(f"{key or 'the state'}: {describe_type(value)} cannot be stored; {unsupported}")
    return UnsafeObjectError(
        f"{key or 'the state'}: {describe_type(value)} cannot be stored safely; {_cure(value)}, or opt into pickle "
        "with SaveOptions(allow_pickle=True), and with LoadOptions(allow_pickle=True) for loading"
    )


def _cure(value: object) -> str:
    if callable(getattr(type(value), "state_dict", None)):
        return "store what its state_dict() returns, and load that with load_state_dict()"
    if isinstance(value, _CODE):
        return "code is no state: store the name and the arguments that lead back to it"
    if isinstance(value, type):
        return "a class is code, not state: store its name"
    base = next((kind for kind in _BASES if isinstance(value, kind)), None)
    if base is not None:
        return f"a subclass of {base.__name__} would lose its class; convert it to {base.__name__}"
    return "convert it to plain values or arrays"


def pickle_object(value: object, key: str) -> bytes:
    """Pickle an object for which the caller opted in."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise UnsafeObjectError(f"{key}: {describe_type(value)} cannot even be pickled: {error}") from error
