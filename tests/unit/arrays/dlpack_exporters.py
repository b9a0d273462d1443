"""Arrays of imaginary libraries that speak DLPack: numpy's, with what the export says changed."""

from __future__ import annotations

from typing import Any

import numpy as np

from savestream.arrays.dlpack_memory import _pointer_of, _Tensor, _Versioned

HOST, DEVICE = (1, 0), (2, 0)


class Exporter:
    """Speaks version 1, and says of each export what it was told to say."""

    def __init__(self, array: np.ndarray, **says: Any) -> None:
        self.array = array
        self.says = says

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.says.get("device_type", 1), 0

    def __dlpack__(
        self, *, max_version: Any = None, dl_device: Any = None, copy: Any = None, stream: Any = None
    ) -> Any:
        capsule = self.array.__dlpack__(max_version=(1, 0))
        managed = _Versioned.from_address(_pointer_of(capsule, b"dltensor_versioned"))
        for name, value in self.says.items():
            setattr(managed if name in ("major", "flags") else managed.tensor, name, value)
        return capsule


class Unversioned:
    """Speaks the protocol as it was before there were versions; immutable."""

    def __init__(self, array: np.ndarray, **says: Any) -> None:
        self.array = array
        self.says = says

    def __dlpack_device__(self) -> tuple[int, int]:
        return HOST

    def __dlpack__(self, stream: Any = None) -> Any:
        capsule = self.array.__dlpack__()
        tensor = _Tensor.from_address(_pointer_of(capsule, b"dltensor"))
        for name, value in self.says.items():
            setattr(tensor, name, value)
        return capsule


class MutableUnversioned(Unversioned):
    def __setitem__(self, index: Any, value: Any) -> None:
        self.array[index] = value


class OnDevice(Exporter):
    """An array whose memory lies on a device; it counts the bytes that it copies to the host."""

    def __init__(self, array: np.ndarray, copied: list[int] | None = None) -> None:
        super().__init__(array, device_type=2)
        self.copied: list[int] = [] if copied is None else copied

    def __dlpack__(
        self, *, max_version: Any = None, dl_device: Any = None, copy: Any = None, stream: Any = None
    ) -> Any:
        if dl_device is None:
            return super().__dlpack__(max_version=max_version)
        assert dl_device == HOST
        self.copied.append(self.array.nbytes)
        return self.array.copy(order="K").__dlpack__(max_version=max_version)

    def __getitem__(self, index: Any) -> Any:
        return type(self)(self.array[index], self.copied)


class StrangeSlices(OnDevice):
    """Indexing means something else here."""

    def __getitem__(self, index: Any) -> Any:
        return OnDevice(self.array[index][::-1].copy(), self.copied)


class NoSlices(OnDevice):
    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError("no indexing")


class StaysOnDevice(Exporter):
    """A device array of a library that cannot copy for others."""

    def __init__(self, array: np.ndarray) -> None:
        super().__init__(array, device_type=2)


class NoCopies(Unversioned):
    """The same, of the time before versions."""

    def __init__(self, array: np.ndarray) -> None:
        super().__init__(array, device_type=2)


class Broken:
    """Fails as it was told to."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome

    def __dlpack_device__(self) -> tuple[int, int]:
        return HOST

    def __dlpack__(self, **_: Any) -> Any:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome
