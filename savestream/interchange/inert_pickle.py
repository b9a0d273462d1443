"""A reader of pickles that runs nothing: it knows the opcodes, and gives each global the meaning that a table states.

What :mod:`pickle` would import and call is looked up in the caller's table instead; anything else is refused by name.
Memory stays within a fixed multiple of the pickle's own size, whatever the pickle claims.
"""

from __future__ import annotations

import itertools
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from savestream.errors import CorruptCheckpointError, SavestreamError, UnsafeObjectError
from savestream.interchange.inert_objects import InertObject, NamedGlobal, UnreadObject, show
from savestream.interchange.pickle_keys import KeyChecker
from savestream.interchange.read_limits import STEPS_BETWEEN_CHECKS, ReadLimits

__all__ = ["read_pickle"]

_HIGHEST_PROTOCOL = 5
_MAXIMUM_CONTAINERS = 16_000_000
_MAXIMUM_STACK = 8_000_000
_MAXIMUM_MARKS = 10_000
# What small objects take in memory.
_CONTAINER_BYTES = 64
_SET_BYTES = 216
_ELEMENT_BYTES = 72


def read_pickle(
    data: bytes,
    names: Mapping[str, object],
    persistent: Callable[[object], object] | None = None,
    limits: ReadLimits | None = None,
    *,
    text_keys: bool = False,
) -> Any:
    """Read one pickle of protocol 2 to 5.

    Parameters
    ----------
    names
        By ``module.name``: what a global stands for, usually a :class:`NamedGlobal`.
    persistent
        Resolves persistent ids; without it they are refused.
    limits
        What its objects may take, and when to end; default: in proportion to its size.
    text_keys
        Refuse dict keys and members of sets other than texts and objects of the table.

    Raises
    ------
    UnsafeObjectError
        It names a global that is not in the table, or applies what cannot be applied.
    CorruptCheckpointError
        It is truncated, malformed, or would need far more memory than its size explains.
    """
    limits = limits or ReadLimits(len(data))
    machine = _Machine(data, names, persistent, limits, KeyChecker(limits, text_only=text_keys))
    try:
        return machine.run()
    except SavestreamError:
        raise
    except (IndexError, struct.error, UnicodeDecodeError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"the pickle is malformed near byte {machine.position}: {error}") from error


class _Machine:
    """The stack machine that pickles are programs for."""

    def __init__(
        self,
        data: bytes,
        names: Mapping[str, object],
        persistent: Callable[[object], object] | None,
        limits: ReadLimits,
        key: KeyChecker,
    ) -> None:
        self._data = data
        self._names = names
        self._persistent = persistent
        self.position = 0
        self._stack: list[Any] = []  # what was pushed since the last mark
        self._below: list[list[Any]] = []  # what lies below each mark
        self._memo: dict[int, Any] = {}
        self._containers = 0
        self._charge = limits.charge
        self._check_stop = limits.check_stop
        self._key = key

    def run(self) -> object:
        data, operations = self._data, _OPERATIONS
        for step in itertools.count(1):
            if not step % STEPS_BETWEEN_CHECKS:
                self._check_stop()
            opcode = data[self.position]
            self.position += 1
            if opcode == 0x2E:  # STOP
                return self._stack.pop()
            operation = operations.get(opcode)
            if operation is None:
                raise UnsafeObjectError(f"it uses the pickle opcode {bytes([opcode])!r}, which is not read here")
            operation(self)
            if len(self._stack) > _MAXIMUM_STACK:
                raise CorruptCheckpointError("the pickle holds too many values at once")
        raise AssertionError("counting never ends")

    # --- pieces of the pickle ---

    def _take(self, count: int) -> bytes:
        start = self.position
        if count < 0 or count > len(self._data) - start:
            raise ValueError(f"{count} bytes are claimed, {len(self._data) - start} are left")
        self.position = start + count
        return self._data[start : self.position]

    def _number(self, layout: struct.Struct) -> Any:
        return layout.unpack(self._take(layout.size))[0]

    def _line(self) -> str:
        end = self._data.index(b"\n", self.position)
        line = self._data[self.position : end]
        self.position = end + 1
        return line.decode()

    def _pop_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._below.pop()
        return items

    def drop_mark(self) -> None:
        self._pop_mark()

    def _count_container(self, nbytes: int = _CONTAINER_BYTES) -> None:
        self._charge(nbytes)
        self._containers += 1
        if self._containers > _MAXIMUM_CONTAINERS:
            raise CorruptCheckpointError("the pickle makes more containers than any checkpoint needs")

    # --- opcodes ---

    def protocol(self) -> None:
        number = self._take(1)[0]
        if not 2 <= number <= _HIGHEST_PROTOCOL:
            raise CorruptCheckpointError(f"the pickle is of protocol {number}; 2 to {_HIGHEST_PROTOCOL} are read")

    def frame(self) -> None:
        self._take(8)  # its length only helps those who read from a stream

    def mark(self) -> None:
        if len(self._below) >= _MAXIMUM_MARKS:
            raise CorruptCheckpointError("the pickle nests too deeply")
        self._below.append(self._stack)
        self._stack = []

    def pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_mark()

    def long(self, layout: struct.Struct) -> None:
        self._stack.append(int.from_bytes(self._take(self._number(layout)), "little", signed=True))

    def text(self, layout: struct.Struct) -> None:
        self._stack.append(self._take(self._number(layout)).decode("utf-8", "surrogatepass"))

    def binary(self, layout: struct.Struct) -> None:
        self._stack.append(self._take(self._number(layout)))

    def bytearray(self) -> None:
        self._stack.append(bytearray(self._take(self._number(_UINT64))))

    def push_empty(self, kind: type) -> None:
        self._count_container(_SET_BYTES if kind is set else _CONTAINER_BYTES)
        self._stack.append(kind())

    def tuple_of(self, count: int) -> None:
        self._count_container()
        stack = self._stack
        if len(stack) < count:
            raise IndexError("the stack is empty")
        items = tuple(stack[len(stack) - count :])
        del stack[len(stack) - count :]
        stack.append(items)

    def tuple_from_mark(self) -> None:
        self._count_container()
        items = self._pop_mark()
        self._stack.append(tuple(items))

    def append(self) -> None:
        item = self._stack.pop()
        if type(self._stack[-1]) is not UnreadObject:
            self._list().append(item)

    def appends(self) -> None:
        items = self._pop_mark()
        if type(self._stack[-1]) is not UnreadObject:
            self._list().extend(items)

    def _list(self) -> list[Any]:
        target = self._stack[-1]
        if type(target) is not list:
            raise TypeError("items are appended to what is no list")
        return target

    def set_item(self) -> None:
        value = self._stack.pop()
        key = self._stack.pop()
        if type(self._stack[-1]) is not UnreadObject:
            self._mapping()[self._key(key)] = value

    def set_items(self) -> None:
        items = self._pop_mark()
        if len(items) % 2:
            raise ValueError("a key lacks its value")
        if type(self._stack[-1]) is UnreadObject:
            return
        mapping = self._mapping()
        for place in range(0, len(items), 2):
            mapping[self._key(items[place])] = items[place + 1]

    def _mapping(self) -> dict[Any, Any]:
        target = self._stack[-1]
        if not isinstance(target, dict):
            raise TypeError("items are set in what is no dict")
        return target

    def add_items(self) -> None:
        items = self._pop_mark()
        target = self._stack[-1]
        if type(target) is UnreadObject:
            return
        if type(target) is not set:
            raise TypeError("items are added to what is no set")
        target.update(map(self._key, items))

    def frozenset(self) -> None:
        self._count_container(_SET_BYTES)
        items = self._pop_mark()
        self._stack.append(frozenset(map(self._key, items)))

    def put(self, layout: struct.Struct) -> None:
        self._charge(_ELEMENT_BYTES)
        self._memo[self._number(layout)] = self._stack[-1]

    def memoize(self) -> None:
        self._charge(_ELEMENT_BYTES)
        self._memo[len(self._memo)] = self._stack[-1]

    def get(self, layout: struct.Struct) -> None:
        number = self._number(layout)
        if number not in self._memo:
            raise ValueError(f"it refers to object {number}, which it has not made")
        self._stack.append(self._memo[number])

    def find_global(self) -> None:
        module, name = self._line(), self._line()
        self._stack.append(self._look_up(module, name))

    def stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise TypeError("a global's name is no text")
        self._stack.append(self._look_up(module, name))

    def _look_up(self, module: str, name: str) -> object:
        full = f"{module}.{name}"
        try:
            return self._names[full]
        except KeyError:
            raise UnsafeObjectError(
                f"it needs {full[:200]}, which is not among what is read without running code"
            ) from None

    def reduce(self) -> None:
        self._check_stop()  # a constructor may take many steps
        arguments = self._stack.pop()
        self._count_container(_CONTAINER_BYTES + _copied_bytes(arguments))
        self._stack.append(self._apply(self._stack.pop(), arguments))

    def new_object_with_keywords(self) -> None:
        keywords = self._stack.pop()
        if type(keywords) is not dict or keywords:
            raise UnsafeObjectError("it makes an object with keyword arguments, which is not read here")
        self.reduce()

    def _apply(self, target: object, arguments: object) -> object:
        if type(target) is UnreadObject:
            return target
        if not isinstance(target, NamedGlobal):
            raise UnsafeObjectError(f"it applies {show(target)}, which is no class or function")
        return target.apply(arguments)

    def build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if isinstance(target, InertObject):
            self._charge(_copied_bytes(state))
            target.set_state(state)
        elif type(target) is OrderedDict and type(state) is dict:
            if "_metadata" in state:  # what a module's state_dict() says of its own format; other attributes are lost
                target._metadata = state["_metadata"]  # type: ignore[attr-defined]
        else:
            raise UnsafeObjectError(f"it sets the state of {show(target)}, which is not read here")

    def persistent_id(self) -> None:
        identifier = self._stack.pop()
        if self._persistent is None:
            raise UnsafeObjectError("it refers to objects outside of it, which is not read here")
        self._stack.append(self._persistent(identifier))


def _copied_bytes(arguments: object) -> int:
    """How much a constructor may make of its arguments; whatever it is, it copies each at most once."""
    nbytes = 0
    for part in arguments if type(arguments) is tuple else ():
        if isinstance(part, str | bytes | bytearray):
            nbytes += 2 * len(part)  # arrays are put in order once more
        elif isinstance(part, tuple | list | set | frozenset):
            nbytes += _ELEMENT_BYTES * len(part)
    return nbytes


_UINT8, _UINT16, _UINT32, _UINT64 = (struct.Struct(layout) for layout in ("<B", "<H", "<I", "<Q"))
_INT32, _FLOAT64 = struct.Struct("<i"), struct.Struct(">d")

_Operation: TypeAlias = Callable[[_Machine], None]


def _constant(value: object) -> _Operation:
    return lambda machine: machine._stack.append(value)


def _value(layout: struct.Struct) -> _Operation:
    return lambda machine: machine._stack.append(machine._number(layout))


_OPERATIONS: dict[int, _Operation] = {
    0x80: _Machine.protocol,
    0x95: _Machine.frame,
    ord("("): _Machine.mark,
    ord("0"): _Machine.pop,
    ord("1"): _Machine.drop_mark,
    ord("N"): _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    ord("J"): _value(_INT32),
    ord("K"): _value(_UINT8),
    ord("M"): _value(_UINT16),
    ord("G"): _value(_FLOAT64),
    0x8A: lambda machine: machine.long(_UINT8),
    0x8B: lambda machine: machine.long(_UINT32),
    0x8C: lambda machine: machine.text(_UINT8),
    ord("X"): lambda machine: machine.text(_UINT32),
    0x8D: lambda machine: machine.text(_UINT64),
    ord("C"): lambda machine: machine.binary(_UINT8),
    ord("B"): lambda machine: machine.binary(_UINT32),
    0x8E: lambda machine: machine.binary(_UINT64),
    0x96: _Machine.bytearray,
    ord(")"): lambda machine: machine.tuple_of(0),
    0x85: lambda machine: machine.tuple_of(1),
    0x86: lambda machine: machine.tuple_of(2),
    0x87: lambda machine: machine.tuple_of(3),
    ord("t"): _Machine.tuple_from_mark,
    ord("]"): lambda machine: machine.push_empty(list),
    ord("}"): lambda machine: machine.push_empty(dict),
    0x8F: lambda machine: machine.push_empty(set),
    ord("a"): _Machine.append,
    ord("e"): _Machine.appends,
    ord("s"): _Machine.set_item,
    ord("u"): _Machine.set_items,
    0x90: _Machine.add_items,
    0x91: _Machine.frozenset,
    ord("q"): lambda machine: machine.put(_UINT8),
    ord("r"): lambda machine: machine.put(_UINT32),
    0x94: _Machine.memoize,
    ord("h"): lambda machine: machine.get(_UINT8),
    ord("j"): lambda machine: machine.get(_UINT32),
    ord("c"): _Machine.find_global,
    0x93: _Machine.stack_global,
    ord("R"): _Machine.reduce,
    0x81: _Machine.reduce,  # NEWOBJ: making an object is applying its class
    0x92: _Machine.new_object_with_keywords,
    ord("b"): _Machine.build,
    ord("Q"): _Machine.persistent_id,
}
