"""JAX's arrays as leaves. JAX is the caller's: this module never imports it.

As long as anything views a buffer, JAX copies it where it could donate it: no view outlives the call that needs it. The
caller's array itself is never shown to numpy, but another one over the same buffer. An array that has to be copied for
numpy would keep that copy; and JAX ends the process where one is deleted while numpy looks at the very same object.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from savestream.arrays.adapter import ArrayAdapter, ArrayInfo, Box, HostArray, Shape
from savestream.arrays.dtypes import PRNG_KEY_WORDS, dtype_from_name, dtype_itemsize, dtype_name
from savestream.errors import PlanError, UnsafeObjectError

__all__ = ["JaxAdapter", "is_jax_type", "jax_adapter_for", "jax_refusal"]

_PREFIX = "prng_key<"
# Of these JAX makes arrays; of the extension types it has only some, which differ between its releases.
_NATIVE = frozenset(
    {
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    }
)
_PACKED = ("int2", "int4", "uint2", "uint4", "float4_e2m1fn")  # several elements in one byte of a device buffer
_EXTENSIONS = frozenset(
    {
        *_PACKED,
        *("bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
        *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    }
)
_PACKED_DTYPES = frozenset(map(dtype_from_name, _PACKED))
_WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))
_LARGEST_INDEX = 2**31 - 1  # of an array, as long as 64-bit integers are switched off


def is_jax_type(kind: type) -> bool:
    """Whether ``kind`` is a class of JAX's arrays, or of what stands for one: a shape, a tracer, a reference."""
    jax = sys.modules.get("jax")
    array = getattr(jax, "Array", None)
    if jax is None or array is None:
        return False
    described = kind is getattr(jax, "ShapeDtypeStruct", None)
    return described or issubclass(kind, array) or _is_tracer(kind) or _is_reference(kind)


def _is_tracer(kind: type) -> bool:
    tracer = getattr(sys.modules.get("jax.core"), "Tracer", None)
    return tracer is not None and issubclass(kind, tracer)


def _is_reference(kind: type) -> bool:
    reference = getattr(sys.modules["jax"], "Ref", None)
    return reference is not None and issubclass(kind, reference)


def jax_adapter_for(kind: type) -> JaxAdapter | None:
    """The adapter for concrete arrays, typed random keys and, as targets, ``jax.ShapeDtypeStruct``; else None."""
    jax = sys.modules["jax"]
    # JAX's public names for these classes are abstract.
    own = kind.__module__.partition(".")[0] in ("jax", "jaxlib") and kind.__name__ in ("ArrayImpl", "PRNGKeyArray")
    if kind is jax.ShapeDtypeStruct or (own and issubclass(kind, jax.Array)):
        return _adapter()
    return None


def jax_refusal(value: Any) -> str:
    """What to do about a value of JAX's that is no array with data."""
    kind = type(value)
    if _is_tracer(kind):
        return "JAX is tracing it (inside jit, grad or vmap), so it holds no data; save outside of the traced function"
    if _is_reference(kind):
        return "a mutable reference cannot be stored; store the array that it refers to, reference[...]"
    return "convert it to a plain jax.Array"


@functools.cache
def _adapter() -> JaxAdapter:
    return JaxAdapter(sys.modules["jax"])


class JaxAdapter(ArrayAdapter):
    """jax.Array, whole or sharded, on any device; typed random keys; ``jax.ShapeDtypeStruct`` as a load target.

    A load replaces arrays, since they cannot be changed: the new one has the target's dtype, sharding and weak type
    (an uncommitted one stays so). A target of a 64-bit dtype is filled exactly, even where ``jax_enable_x64`` is off.
    """

    framework = "jax"

    def __init__(self, jax: Any) -> None:
        self._jax = jax
        self._description = jax.ShapeDtypeStruct
        self._infos: dict[tuple[Any, Shape], ArrayInfo] = {}

    # --- saving ---

    def info(self, array: Any, key: str) -> ArrayInfo:
        self._refuse_without_data(array, key)
        return self._describe(array, key)

    def infos(self, arrays: Sequence[Any], keys: Sequence[str]) -> list[ArrayInfo]:
        known, description, found = self._infos, self._description, []
        for array, key in zip(arrays, keys, strict=True):
            info = known.get((array.dtype, array.shape))
            if info is None or type(array) is description or array.is_deleted():
                info = self.info(array, key)
            found.append(info)
        return found

    def _describe(self, array: Any, key: str) -> ArrayInfo:
        info = self._infos.get((array.dtype, array.shape))
        if info is not None:
            return info
        name, shape = self._name(array.dtype, key), tuple(array.shape)
        itemsize = dtype_itemsize(name)
        strides = tuple([itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))])
        if len(self._infos) > 100_000:  # shapes that change with every save
            self._infos.clear()
        info = self._infos[array.dtype, array.shape] = ArrayInfo(name, shape, strides, itemsize)
        return info

    def _name(self, dtype: Any, key: str) -> str:
        if not isinstance(dtype, np.dtype):
            name = self._key_names.get(dtype)
            if name is None:
                raise UnsafeObjectError(
                    f"{key}: random keys of the implementation {dtype} cannot be stored as such; store "
                    f"jax.random.key_data() of them, or use one of {', '.join(PRNG_KEY_WORDS)}"
                )
            return name
        try:
            return dtype_name(dtype)
        except UnsafeObjectError as error:
            raise UnsafeObjectError(f"{key}: {error}") from None

    @functools.cached_property
    def _key_names(self) -> dict[Any, str]:
        """Dtype names by JAX's dtypes of typed random keys."""
        random, shape_of = self._jax.random, self._jax.eval_shape
        return {
            shape_of(functools.partial(random.key, 0, impl=name)).dtype: f"{_PREFIX}{name}>" for name in PRNG_KEY_WORDS
        }

    def _refuse_without_data(self, array: Any, key: str) -> None:
        if type(array) is self._description:
            raise UnsafeObjectError(
                f"{key}: a jax.ShapeDtypeStruct only describes an array; it can be the target of a load, not saved"
            )
        if array.is_deleted():
            raise UnsafeObjectError(
                f"{key}: the array was deleted, as donating it to a jitted function does; save what that function "
                "returned"
            )

    def addresses(self, arrays: Sequence[Any]) -> list[int]:
        return list(map(self._address, arrays))

    def _address(self, array: Any) -> int:
        """Where the buffer lies in host memory; addresses of different devices could be equal by chance."""
        try:
            devices = array.sharding.device_set
            if next(iter(devices)).platform != "cpu" or not array.sharding.is_fully_replicated:
                return 0
            if len(devices) > 1:
                array = array.addressable_data(0)  # all replicas are equal
            return int(array.unsafe_buffer_pointer())
        except (RuntimeError, ValueError, AttributeError):  # deleted, sharded, a mere description
            return 0

    def split(self, array: Any, key: str) -> Sequence[tuple[Shape, Any]] | None:
        self._refuse_without_data(array, key)
        if array.is_fully_replicated and (array.is_fully_addressable or array.sharding.addressable_devices):
            return None
        own = [shard for shard in array.addressable_shards if shard.replica_id == 0]
        boxes = [(_box(shard.index, array.shape)[0], shard.data) for shard in own]
        return sorted(boxes, key=lambda box: box[0])

    def host_view(self, array: Any) -> HostArray:
        if isinstance(array.dtype, np.dtype):
            return self._viewed(array)
        words = self._viewed(self._jax.random.key_data(array))
        return words.view(np.dtype([("key_data", words.dtype, words.shape[-1:])])).reshape(array.shape)

    def _viewed(self, array: Any) -> HostArray:
        with self._explaining(array):
            handle = array.addressable_data(0)
            if self._is_shown(array) and not self._keeps_views:
                return np.asarray(handle)
            with self._jax.transfer_guard("allow"):
                return np.asarray(self._jax.device_put(handle, handle.sharding))  # which does not outlive this line

    @contextlib.contextmanager
    def _explaining(self, array: Any) -> Iterator[None]:
        """Say of an array that went away under our hands what to do about it."""
        try:
            yield
        except RuntimeError as error:
            if array.is_deleted():
                raise PlanError(
                    f"an array of shape {array.shape} and dtype {array.dtype} was deleted or donated before it was "
                    "staged; await handle.staged() first"
                ) from error
            raise

    @functools.cached_property
    def _keeps_views(self) -> bool:
        """Whether this release of JAX keeps in an array the view that numpy was given of it."""
        probe = self._jax.device_put(np.zeros(1, dtype_from_name("bfloat16")))  # no simple buffer of numpy's
        return weakref.ref(np.asarray(probe))() is not None

    def _is_shown(self, array: Any) -> bool:
        """Whether numpy can look at the buffer as it lies there."""
        dtype = array.dtype
        if dtype in _PACKED_DTYPES or not isinstance(dtype, np.dtype):
            return False
        return bool(next(iter(array.sharding.device_set)).platform == "cpu")

    def copy_elements(self, array: Any, start: int, stop: int, target: HostArray) -> None:
        partial = isinstance(array.dtype, np.dtype) and stop - start < array.size
        if partial and array.size <= _LARGEST_INDEX and not self._is_shown(array):
            with self._explaining(array), self._unguarded(), self._keeping_bits(array.dtype):
                part = self._cut(array.addressable_data(0), start, stop - start)  # only this leaves the device
            array, start, stop = part, 0, stop - start
        super().copy_elements(array, start, stop, target)

    @contextlib.contextmanager
    def _unguarded(self) -> Iterator[None]:
        """Switch off in this thread what helps to debug programs: it is no fault to copy, or to save a nan."""
        with self._jax.transfer_guard("allow"), self._jax.debug_nans(False):
            yield

    @functools.cached_property
    def _cut(self) -> Any:
        """Jitted: some elements of an array, counted in C order."""
        lax = self._jax.lax

        def cut(array: Any, start: Any, count: int) -> Any:
            return lax.dynamic_slice_in_dim(array.reshape(-1), start, count)

        return self._jax.jit(cut, static_argnums=2)

    def join(self, arrays: Sequence[Any]) -> HostArray:
        try:
            if not self._keeps_views and all(map(self._is_shown, arrays)):
                parts = [np.asarray(array.addressable_data(0)).tobytes() for array in arrays]
                return np.frombuffer(b"".join(parts), np.uint8)
        except RuntimeError:  # one of them was deleted: found below
            pass
        return np.frombuffer(b"".join([self.host_view(array).tobytes() for array in arrays]), np.uint8)

    # --- loading ---

    def target_info(self, array: Any, key: str) -> ArrayInfo:
        return self._describe(array, key)  # also of an array that was deleted: it says what to make anew

    def fill_problem(self, array: Any) -> str | None:
        if not self._makes(self._name(array.dtype, "")):
            return f"JAX has no arrays of dtype {array.dtype}"
        try:
            if array.sharding is not None:
                array.sharding.addressable_devices_indices_map(array.shape)
        except (ValueError, RuntimeError) as error:
            return f"its sharding cannot be used here ({error})"
        return None

    def _makes(self, name: str) -> bool:
        """Whether JAX has arrays of a dtype; those of 64 bits perhaps only where ``jax_enable_x64`` is on."""
        if name.startswith(_PREFIX) or name in _NATIVE:
            return True
        return name in _EXTENSIONS and hasattr(sys.modules["jax.numpy"], name)

    def target_boxes(self, array: Any, key: str) -> Sequence[Box] | None:
        sharding = array.sharding
        if sharding is None or sharding.is_fully_replicated:
            return None
        try:
            indices = sharding.addressable_devices_indices_map(array.shape)
        except (ValueError, RuntimeError) as error:
            raise PlanError(f"{key}: the target's sharding cannot be used here ({error})") from error
        return list(dict.fromkeys([_box(index, array.shape) for index in indices.values()]))

    def filled(self, array: Any, parts: Sequence[tuple[Shape, HostArray]]) -> Any:
        with self._keeping_bits(array.dtype):
            if array.sharding is None or len(array.sharding.device_set) == 1:
                made = self._on_one_device(array, parts[0][1])
            else:
                made = self._on_devices(array, dict(parts))
            return self._weakened(made) if getattr(array, "weak_type", False) else made  # keys have none

    def _on_one_device(self, array: Any, content: HostArray) -> Any:
        if array.sharding is None:
            return self._put(content, array.dtype, None)
        if type(array) is self._description or array.committed:
            return self._put(content, array.dtype, array.sharding)
        made = self._put(content, array.dtype, None)
        if made.sharding.device_set == array.sharding.device_set:
            return made
        with self._jax.default_device(_first_device(array)):
            return self._put(content, array.dtype, None)

    def _on_devices(self, array: Any, parts: dict[Shape, HostArray]) -> Any:
        """Each device gets its box. Several may share a buffer, since JAX never writes into one that it was given."""
        jax, sharding, shape = self._jax, array.sharding, array.shape
        pieces = []
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            place = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            pieces.append(self._put(parts[_box(index, shape)[0]], array.dtype, place))
        options = {} if pieces else {"dtype": array.dtype}
        return jax.make_array_from_single_device_arrays(shape, sharding, pieces, **options)

    def _put(self, content: HostArray, dtype: Any, place: Any) -> Any:
        """An array over a fresh buffer, without a copy where JAX can use it as it is."""
        jax = self._jax
        if isinstance(dtype, np.dtype):
            return jax.device_put(content, place)
        implementation = self._key_names[dtype][len(_PREFIX) : -1]
        return jax.device_put(jax.random.wrap_key_data(jax.device_put(content["key_data"]), impl=implementation), place)

    def _weakened(self, made: Any) -> Any:
        """The same array of weak type, where JAX has that: of its default dtypes, in this process.

        An update takes the weak type of what it updates; there is no other public way to give it to existing elements.
        """
        jax, number = self._jax, {"b": False, "i": 0, "f": 0.0, "c": 0j}.get(made.dtype.kind)
        if number is None or not made.is_fully_addressable:
            return made

        def weaken(array: Any) -> Any:
            numbers = sys.modules["jax.numpy"]
            return numbers.broadcast_to(numbers.asarray(number), array.shape).at[...].set(array)

        with self._unguarded(), jax.default_device(_first_device(made)):
            place = {"out_shardings": made.sharding} if made.committed else {}
            weak = jax.jit(weaken, **place)(made)
        return weak if weak.dtype == made.dtype else made

    @contextlib.contextmanager
    def _keeping_bits(self, dtype: Any) -> Iterator[None]:
        """Let JAX make arrays of this dtype in this thread, even where it would cut 64 bits down to 32."""
        if self._holds(dtype):
            yield
            return
        switch = self._jax.enable_x64 if hasattr(self._jax, "enable_x64") else self._jax.experimental.enable_x64
        with switch(True):
            yield

    def _holds(self, dtype: Any) -> bool:
        return dtype not in _WIDE or self._jax.dtypes.canonicalize_dtype(dtype) == dtype

    def from_host(self, array: HostArray, dtype: str) -> Any:
        """An array on JAX's default device.

        numpy's array itself where JAX has no such dtype, or holds 64 bits only with ``jax_enable_x64``, which is off:
        JAX would cut them down to 32 without a word.
        """
        if dtype.startswith(_PREFIX):
            return self._put(array, {name: key for key, name in self._key_names.items()}[dtype], None)
        if not self._makes(dtype) or array.dtype != dtype_from_name(dtype) or not self._holds(array.dtype):
            return array
        return self._put(array, array.dtype, None)


def _first_device(array: Any) -> Any:
    return next(iter(array.sharding.addressable_devices))


def _box(index: Sequence[slice], shape: Shape) -> Box:
    """Offsets and sizes behind the slices of a shard; those of keys have one more, for the words of a key."""
    bounds = [part.indices(size) for part, size in zip(index, shape, strict=False)]
    return tuple([start for start, _, _ in bounds]), tuple([max(0, stop - start) for start, stop, _ in bounds])
