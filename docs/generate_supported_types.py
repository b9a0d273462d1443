"""Writes docs/supported-types.md from the tables that the tests try: every entry is saved, loaded or refused here.

Run it as ``make docs``; it needs PyTorch and JAX. A test compares the page with what this gives.
"""

from __future__ import annotations

import array
import collections
import ctypes
import datetime
import decimal
import enum
import fractions
import inspect
import pathlib
import random
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from savestream import LoadOptions, SaveOptions, UnsafeObjectError, blocking
from savestream.storage_backends import MemoryBackend

PAGE = pathlib.Path(__file__).with_name("supported-types.md")
TABLES = pathlib.Path(__file__).parents[1] / "tests" / "frameworks"
if str(TABLES) not in sys.path:  # the tables are the tests' own, and are found only from here on
    sys.path.insert(0, str(TABLES))

from leaf_containers import CONTAINERS, RECORD_TYPES, Container, leaf_of, outline  # noqa: E402
from leaf_dtypes import BY_STORED, DTYPES, FRAMEWORKS, LeafDtype  # noqa: E402
from leaf_layouts import LAYOUTS, build  # noqa: E402
from leaf_targets import STYLES, Mode, has_target, make_target  # noqa: E402
from refused_leaves import REFUSED, RefusedLeaf  # noqa: E402

CONTIGUOUS = LAYOUTS[0]


def main() -> None:
    """Write the page."""
    PAGE.write_text(render(), encoding="utf-8")


def render() -> str:
    """The whole page."""
    sections = (_dtypes, _layouts, _targets, _containers, _values, _others, _refused)
    parts = [_introduction(), *(line for section in sections for line in section())]
    return "\n".join(parts).rstrip() + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield ""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _code(text: object) -> str:
    return "`" + str(text).replace("|", "\\|") + "`"


def _text(lines: str) -> str:
    return "\n" + inspect.cleandoc(lines)


def _class_name(value: object) -> str:
    kind = type(value)
    return (
        kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
    )


def _place() -> tuple[MemoryBackend, str]:
    return MemoryBackend("docs"), "checkpoint"


def _through(state: Any, *, framework: str = "numpy", types: Sequence[type] = ()) -> Any:
    place = _place()
    blocking.save(state, place)
    return blocking.load(place, framework=framework, options=LoadOptions(types=types))


def _introduction() -> str:
    releases = {module.__name__: ".".join(module.__version__.split(".")[:2]) for module in (torch, jax)}
    return f"""# Supported types

<!-- written by docs/generate_supported_types.py ("make docs"); change that, and the tables in tests/frameworks -->

Every line of these tables was tried when the page was made, with PyTorch {releases["torch"]} and
JAX {releases["jax"]}; the test suite tries their combinations. Whatever is not refused comes back bit
for bit: NaN payloads, signed zeros, padding of records.

Contents: [dtypes](#dtypes) · [layouts](#layouts) · [targets](#targets) · [containers](#containers) ·
[values](#values) · [other arrays](#other-arrays) · [refused](#refused)"""


# --- arrays ------------------------------------------------------------------------------------------------


def _dtypes() -> Iterator[str]:
    yield _text("""
        ## Dtypes

        A leaf is stored under a dtype name ([format, section 6](format.md#6-dtype-names)) that belongs to no
        framework. A load without a target gives numpy arrays, or those of `framework=`; where that framework has no
        such dtype, numpy's.
    """)
    yield from _dtype_table("numpy", "numpy and ml_dtypes")
    yield _text("""
        Of dates, durations, texts, bytes, voids and records these are examples: any unit, width and nesting will do.
        Records may be aligned, have holes, and fields of any of these dtypes.
    """)
    yield from _dtype_table("torch", "PyTorch")
    yield _text("""
        `int3`, `bits8` and the like exist in PyTorch only: numpy sees unsigned integers that hold the same bytes, and
        nothing is converted to or from them. `requires_grad` is not stored; targets keep theirs.
    """)
    yield from _dtype_table("jax", "JAX")
    yield _text("""
        JAX makes arrays of 64-bit numbers only while `jax_enable_x64` is on. While it is off, a load without a target
        gives them as numpy arrays, and a target of such a dtype is filled all the same. A typed key is a record of its
        words to numpy.
    """)


def _dtype_table(framework: str, title: str) -> Iterator[str]:
    dtypes = [dtype for dtype in DTYPES if dtype.framework == framework]
    generator = np.random.default_rng(0)
    state = {dtype.name: build(dtype, CONTIGUOUS, generator).leaf for dtype in dtypes}
    place = _place()
    blocking.save(state, place)
    stored = blocking.read_manifest(place).contents.state_dict_metadata.values()
    columns = {each: blocking.load(place, framework=each) for each in FRAMEWORKS}
    jax.config.update("jax_enable_x64", True)
    try:
        with_x64 = blocking.load(place, framework="jax")
    finally:
        jax.config.update("jax_enable_x64", False)
    yield f"\n### {title}"
    head = [title, "stored as", "no target", '`framework="torch"`', '`framework="jax"`']
    yield from _table(
        head,
        [
            [
                _own_name(dtype),
                _stored_name(entry.properties.dtype),
                _array_name(columns["numpy"][dtype.name]),
                _array_name(columns["torch"][dtype.name]),
                _jax_name(columns["jax"][dtype.name], with_x64[dtype.name]),
            ]
            for dtype, entry in zip(dtypes, stored, strict=True)
        ],
    )


def _own_name(dtype: LeafDtype) -> str:
    if dtype.framework == "torch":
        return _code(f"torch.{dtype.name}")
    return dtype.name if " " in dtype.name else _code(dtype.name)


def _stored_name(name: str) -> str:
    return "a record, as JSON" if name.startswith("{") else _code(name)


def _array_name(found: Any) -> str:
    if isinstance(found, torch.Tensor):
        return _code(found.dtype)
    if isinstance(found, jax.Array):
        return f"jax {_code(found.dtype)}"
    names = found.dtype.names
    if names is None:
        return f"numpy {_code(found.dtype)}"
    return "numpy, `key_data`" if names == ("key_data",) else "numpy record"


def _jax_name(found: Any, with_x64: Any) -> str:
    if type(found) is type(with_x64):
        return _array_name(found)
    return f"{_array_name(with_x64)} with x64, else numpy"


def _layouts() -> Iterator[str]:
    yield _text("""
        ## Layouts

        A leaf is stored as its elements in C order, whatever its layout: of a view no byte more than its own elements,
        of a broadcast array every element. Without a target it comes back contiguous.
    """)
    generator = np.random.default_rng(0)
    rows = []
    for layout in LAYOUTS:
        cells = []
        for framework in FRAMEWORKS:
            dtype = _example(framework, layout.accepts) if framework in layout.makes else None
            cells.append("" if dtype is None else _saved_layout(build(dtype, layout, generator)))
        rows.append([layout.name, *cells])
    yield from _table(["layout", "numpy", "PyTorch", "JAX"], rows)


def _example(framework: str, accepts: Callable[[LeafDtype], bool]) -> LeafDtype | None:
    return next((dtype for dtype in DTYPES if dtype.framework == framework and accepts(dtype)), None)


def _saved_layout(built: Any) -> str:
    found = _through({"leaf": built.leaf})["leaf"]
    if found.tobytes() != built.expected.tobytes() or not found.flags.c_contiguous:
        raise RuntimeError(f"a leaf came back as {found!r} instead of {built.expected!r}")
    return "yes"


def _targets() -> Iterator[str]:
    yield _text("""
        ## Targets

        A target says what comes back: its framework, dtype, shape and place. The checkpoint may come from another
        framework.
    """)
    rows = []
    for framework, styles in STYLES.items():
        for style in styles:
            mode = Mode("", "fill", framework, style)
            dtype = next(
                dtype for dtype in BY_STORED[framework].values() if has_target(dtype, mode) and dtype.itemsize > 3
            )
            target = make_target((4, 6), dtype, mode)
            place = _place()
            blocking.save({"leaf": build(dtype, CONTIGUOUS, np.random.default_rng(0)).leaf}, place)
            found = blocking.load(place, {"leaf": target})["leaf"]
            rows.append([framework, style, "filled in place" if found is target else f"a new {_class_name(found)}"])
    yield from _table(["framework", "target", "result"], rows)
    yield _text("""
        Another shape is always refused, another dtype unless `cast=True` is given. That converts numbers to numbers as
        `numpy.ndarray.astype` does: integers wrap around, what is too large for `float8_e4m3fn` becomes nan (PyTorch's
        own conversion gives the largest number), subnormal numbers keep their values (JAX's own may give 0). Complex
        numbers become no real ones; dates, texts, records, keys and PyTorch's own types are not converted. A refused
        load touches nothing.
    """)


def _containers() -> Iterator[str]:
    yield _text("""
        ## Containers

        With a target the target's containers are filled. Without one the classes of namedtuples, dataclasses and enums
        are used only where `LoadOptions(types=[...])` gives them: a name in a file is never imported.
    """)
    yield from _table(
        ["container", "comes back as", "with `types=`"],
        [[_code_words(container.name), *_rebuilt(container)] for container in CONTAINERS],
    )
    yield _text("""
        Keys of dicts may be str (any text), int, bool, float, None, bytes and tuples of these; their order is kept, and
        `1` and `"1"` stay apart. Leaves that are the same memory are stored once.
    """)


def _code_words(name: str) -> str:
    return name if " " in name or name == "alone" else _code(name)


def _rebuilt(container: Container) -> list[str]:
    state = container.wrap(np.arange(3), 7)
    names = []
    for types in ((), RECORD_TYPES):
        found = _through(state, types=types)
        leaf = leaf_of(found)
        expected = outline(container.wrap(leaf, 7), leaf, known_types=bool(types))
        if leaf.tolist() != [0, 1, 2] or outline(found, leaf) != expected:
            raise RuntimeError(f"{container.name} came back as {found!r}")
        same = type(found) is type(state)
        names.append("the same" if same else _code(_class_name(found)))
    return names


# --- everything else ---------------------------------------------------------------------------------------


class Colour(enum.Enum):
    """An enum."""

    RED = 1


def _plain_values() -> dict[str, Any]:
    zone = datetime.timezone(datetime.timedelta(hours=5, minutes=30), "IST")
    return {
        "None, bool": [None, True, False],
        "int of any size": [0, -7, 2**200],
        "float: nan, inf and -0.0 too": [0.1, float("inf"), -0.0],
        "complex": [1 + 2j],
        "str: any text, lone surrogates too": ["", "é\0", "\ud800"],
        "bytes, bytearray": [b"\0\xff", bytearray(b"ab")],
        "containers of values, sets and frozensets too": [
            [(1, {"a": {2}})],
            frozenset({3}),
            collections.deque([1], 3),
            collections.OrderedDict(a=1),
            collections.Counter("aab"),
            collections.defaultdict(list, {1: []}),
        ],
        "date, time, datetime, timedelta, timezone": [
            datetime.date(2024, 2, 29),
            datetime.time(1, 2, 3, 4),
            datetime.datetime(2024, 2, 29, 12, tzinfo=zone),
            datetime.timedelta(days=-1, microseconds=3),
        ],
        "Decimal, Fraction, UUID": [decimal.Decimal("1.10"), fractions.Fraction(1, 3), uuid.UUID(int=5)],
        "pathlib's paths": [pathlib.PurePosixPath("a/b"), pathlib.Path("c")],
        "range, slice, Ellipsis": [range(3, 9, 2), slice(1, None), ...],
        "numpy scalars and dtypes": [np.float32(0.1), np.datetime64("2024-02-29"), np.dtype(">f4"), np.float32],
        "`torch.dtype`, `device`, `Size`, `layout`, `memory_format`": [
            *(torch.bfloat16, torch.device("cpu"), torch.Size([2, 3]), torch.strided, torch.channels_last),
        ],
        "scalar types of `jax.numpy`": [jnp.bfloat16],
        "generators: `random.Random`, numpy's, `torch.Generator`": [
            *(random.Random(1), np.random.default_rng(1), np.random.RandomState(1), np.random.PCG64(1)),
            torch.Generator().manual_seed(1),
        ],
        "enum members": [Colour.RED],
    }


_DRAWS: dict[type, Callable[[Any], object]] = {
    random.Random: lambda generator: generator.random(),
    np.random.Generator: lambda generator: generator.random(),
    np.random.RandomState: lambda generator: generator.random_sample(),
    np.random.PCG64: lambda generator: generator.random_raw(),
    torch.Generator: lambda generator: torch.rand(1, generator=generator).item(),
}


def _content(value: object) -> object:
    """What must be equal of two values of one class: what a generator draws next, or else all that they show."""
    draw = _DRAWS.get(type(value))
    return repr(value) if draw is None else draw(value)


def _values() -> Iterator[str]:
    yield _text("""
        ## Values

        What is no array is a value, stored without pickle and rebuilt without importing anything. A dict, list or other
        container without arrays is one value.
    """)
    rows = []
    for name, values in _plain_values().items():
        found = _through({"values": values, "leaf": np.zeros(1)})["values"]
        changed = [_class_name(new) for old, new in zip(values, found, strict=True) if type(new) is not type(old)]
        if not changed and list(map(_content, values)) != list(map(_content, found)):
            raise RuntimeError(f"{values!r} came back as {found!r}")
        rows.append([name, _code(changed[0]) + ", which carries the name" if changed else "the same"])
    yield from _table(["value", "comes back as"], rows)
    yield _text("""
        An enum's class is used where `types=` or the target gives it. A generator comes back in its state.
    """)


class Exporter:
    """An array of a library that savestream does not know."""

    def __init__(self, elements: np.ndarray) -> None:
        self._elements = elements

    def __dlpack__(self, **options: Any) -> Any:
        return self._elements.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._elements.__dlpack_device__()


def _others() -> Iterator[str]:
    yield _text("""
        ## Other arrays

        Arrays of other libraries are stored like numpy's, filled in place as targets, and come back as numpy arrays.
    """)
    makes: dict[str, Callable[[], Any]] = {
        "what offers DLPack": lambda: Exporter(np.arange(3.0)),
        "`array.array`": lambda: array.array("d", [0, 1, 2]),
        "`memoryview`": lambda: memoryview(bytearray(range(3))),
        "ctypes arrays": lambda: (ctypes.c_double * 3)(0, 1, 2),
    }
    rows = []
    for name, make in makes.items():
        place = _place()
        blocking.save({"leaf": make()}, place)
        alone, target = blocking.load(place)["leaf"], make()
        found = blocking.load(place, {"leaf": target})["leaf"]
        rows.append([name, _array_name(alone), "filled in place" if found is target else _class_name(found)])
    yield from _table(["array", "no target", "as a target"], rows)


def _refused() -> Iterator[str]:
    yield _text("""
        ## Refused

        These raise `UnsafeObjectError` before anything is written. The message begins with the key, here `w`.
        `SaveOptions(allow_pickle=True)` stores what the last column names; arrays are never pickled.
    """)
    yield from _table(
        ["leaf", "message", "`allow_pickle=True`"],
        [
            [f"{case.framework}: {case.name}", _message(case), "pickled" if case.picklable else "refused"]
            for case in REFUSED
        ],
    )


def _message(case: RefusedLeaf) -> str:
    messages: list[str] = []

    def use(leaf: Any) -> None:
        for allow_pickle in (False, True):
            try:
                blocking.save({"w": leaf}, _place(), options=SaveOptions(allow_pickle=allow_pickle))
            except UnsafeObjectError as error:
                messages.append(str(error))

    case.give(use)
    if len(messages) != (1 if case.picklable else 2):
        raise RuntimeError(f"{case.name} is not refused as the table says: {messages}")
    return messages[0].replace("|", "\\|").replace("<", "\\<")


if __name__ == "__main__":
    main()
