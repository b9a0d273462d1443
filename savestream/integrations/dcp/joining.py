"""Classes that derive from PyTorch's, although PyTorch is imported only when the first instance is made."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from savestream.integrations.dcp.frameworks import checkpoint_module

__all__ = ["JoinsTorch"]

_Foreign: Any = object  # type checkers let instances pass for torch's


class JoinsTorch(_Foreign):  # type: ignore[misc]  # of a base that is anything to it, on purpose
    """Instances are of a class that derives from this one and from torch's class called ``torch_class``."""

    torch_class: ClassVar[str]
    _joined_from: ClassVar[type[JoinsTorch]]

    def __new__(cls, *args: Any, **options: Any) -> Any:
        del args, options
        kind: Any = cls
        return object.__new__(_joined(kind))

    def __getstate__(self) -> dict[str, Any]:
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        return (_remade, (self._joined_from,), self.__getstate__())


def _remade(kind: type[JoinsTorch]) -> Any:
    return kind.__new__(kind)


@functools.cache
def _joined(kind: Any) -> Any:
    base = getattr(checkpoint_module("storage"), kind.torch_class)
    if issubclass(kind, base):
        return kind
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(base)(kind.__name__, (kind, base), {**names, "_joined_from": kind})
