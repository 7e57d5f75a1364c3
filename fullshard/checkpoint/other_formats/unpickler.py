"""An unpickler that executes nothing: it builds plain containers, and the caller resolves names.

It knows the opcodes that `torch.save` and DCP write. A pickle cannot make it allocate more than its own size justifies:
lengths are checked against its bytes, and the number of objects is limited by its size.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LONGEST_INTEGER = 16  # bytes: the states of random generators have 128 bits
FEWEST_BYTES = 2  # of a pickle for each object; Python's pickler writes more
DEEPEST = 1000  # nested marks; Python's pickler writes no more
SPARE = 1000  # objects that a pickle of any size may create


class DamagedError(Exception):
    """A pickle that cannot be read. The message completes a sentence about it."""


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A function or class that a pickle refers to. `make` is called in its place, and is chosen by the caller."""

    path: str
    make: Callable[..., Any]


@dataclass(slots=True, eq=False)
class Placeholder:
    """Stands for an object of the class `path`, which is not imported. `args` are the constructor's, `state` what
    `__setstate__` would receive."""

    path: str
    args: tuple[Any, ...]
    state: Any = None


class Unpickler:
    """The stack machine. `resolve(module, name)` returns a `GlobalName` or a plain value; `persistent(id)` returns the
    object of a persistent id."""

    def __init__(self, data: bytes | bytearray, resolve: Callable[[str, str], Any], persistent: Callable[[Any], Any]):
        self.data, self.resolve, self.persistent = bytes(data), resolve, persistent
        self.at, self.objects_left = 0, len(data) // FEWEST_BYTES + SPARE
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def load(self) -> Any:
        """The pickled object. Raises DamagedError, or whatever `resolve` and `persistent` raise."""
        try:
            while (code := self.data[self.at]) != STOP:
                self.at += 1
                OPCODES[code](self)
            return self.stack.pop()
        except KeyError:
            raise DamagedError("it has an unknown opcode, or refers to an unknown object") from None
        except IndexError:
            raise DamagedError("it ends early") from None
        except (TypeError, ValueError, struct.error):
            raise DamagedError("it is malformed") from None

    def take(self, count: int) -> bytes:
        start, self.at = self.at, self.at + count
        if self.at > len(self.data):
            raise DamagedError("it ends early")
        return self.data[start : self.at]

    def number(self, width: int) -> int:
        if width == 1:  # the most frequent by far
            self.at += 1
            return self.data[self.at - 1]
        return int.from_bytes(self.take(width), "little")

    def line(self) -> str:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise DamagedError("it ends early")
        text = self.take(end - self.at).decode()
        self.at += 1
        return text

    def push_new(self, value: Any, cost: int = 1) -> None:
        """Push a new object."""
        self.objects_left -= cost
        if self.objects_left < 0:
            raise DamagedError("it creates more objects than a pickle of its size can hold")
        self.stack.append(value)

    def pop_mark(self) -> list[Any]:
        """Remove and return the objects above the last mark."""
        above, self.stack = self.stack, self.marks.pop()
        return above


# -- values -------------------------------------------------------------------------------------------------

Opcode = Callable[[Unpickler], None]


def _constant(value: Any) -> Opcode:
    return lambda m: m.stack.append(value)


def _integer(width: int, signed: bool = False) -> Opcode:
    if not signed:
        return lambda m: m.stack.append(m.number(width))
    return lambda m: m.stack.append(int.from_bytes(m.take(width), "little", signed=True))


def _sized(width: int, make: Callable[[bytes], Any]) -> Opcode:
    """A value that follows its length, an integer of `width` bytes."""
    return lambda m: m.push_new(make(m.take(m.number(width))))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _long(data: bytes) -> int:
    if len(data) > LONGEST_INTEGER:
        raise DamagedError(f"it has an integer of {len(data)} bytes")
    return int.from_bytes(data, "little", signed=True)


# -- containers ---------------------------------------------------------------------------------------------


def key(value: Any) -> Any:
    """`value` if it is safe as a key. Hashing nested tuples can overflow the stack, and many large integers can share one
    hash."""
    inside = value if isinstance(value, tuple) else (value,)
    plain = all(not isinstance(v, tuple | list | dict | set | frozenset | bytearray) for v in inside)
    if not plain or len(inside) > 32 or any(isinstance(v, int) and v.bit_length() > 63 for v in inside):
        raise DamagedError("it has a dict or set with keys that are neither text nor numbers")
    return value


def _tuple(count: int) -> Opcode:
    def execute(m: Unpickler) -> None:
        if len(m.stack) < count:
            raise DamagedError("it ends early")
        items = tuple(m.stack[len(m.stack) - count :])
        del m.stack[len(m.stack) - count :]
        m.push_new(items)

    return execute


def _set_items(m: Unpickler, items: list[Any]) -> None:
    target = m.stack[-1]
    if isinstance(target, dict):
        target.update(zip(map(key, items[::2]), items[1::2], strict=True))
    elif not isinstance(target, Placeholder):  # the items of a placeholder are dropped
        raise DamagedError("it sets items of an object that is not a dict")


def _append(m: Unpickler, items: list[Any]) -> None:
    target = m.stack[-1]
    if isinstance(target, list):
        target += items
    elif not isinstance(target, Placeholder):
        raise DamagedError("it appends to an object that is not a list")


def _add(m: Unpickler) -> None:
    items, target = m.pop_mark(), m.stack[-1]
    if not isinstance(target, set):
        raise DamagedError("it adds to an object that is not a set")
    target.update(map(key, items))


def _pop(m: Unpickler) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.pop_mark()


def _mark(m: Unpickler) -> None:
    if len(m.marks) == DEEPEST:
        raise DamagedError(f"it is nested deeper than {DEEPEST} levels")
    m.marks.append(m.stack)
    m.stack = []


# -- names and objects --------------------------------------------------------------------------------------


def _named(m: Unpickler, module: Any, name: Any) -> None:
    if not (isinstance(module, str) and isinstance(name, str)):
        raise DamagedError("it has a name that is not text")
    m.push_new(m.resolve(module, name))


def _global(m: Unpickler) -> None:
    module = m.line()
    _named(m, module, m.line())


def _stack_global(m: Unpickler) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    _named(m, module, name)


def _call(m: Unpickler, args: Any) -> None:
    called = m.stack.pop()
    if not isinstance(called, GlobalName) or not isinstance(args, tuple):
        raise DamagedError("it calls an object that is not a class")
    made = called.make(*args)
    cost = 1 + len(made) // 8 if isinstance(made, list | tuple | dict | set) else 1  # a container may be a copy
    m.push_new(made, cost)


def _call_with_keywords(m: Unpickler) -> None:
    m.stack.pop()
    _call(m, m.stack.pop())


def _build(m: Unpickler) -> None:
    state, target = m.stack.pop(), m.stack[-1]
    if isinstance(target, Placeholder):
        target.state = state
    elif not isinstance(target, dict):  # an OrderedDict may carry attributes, as a state dict does
        raise DamagedError("it sets attributes of an object that has none")


def _remember(m: Unpickler, index: int) -> None:
    m.memo[index] = m.stack[-1]


def _skip(what: object) -> None:
    return


def _skip_frame(m: Unpickler) -> None:
    if m.number(8) > len(m.data) - m.at:
        raise DamagedError("it ends early")


STOP = ord(".")
OPCODES: dict[int, Opcode] = {
    0x80: lambda m: _skip(m.take(1)),  # PROTO
    0x95: _skip_frame,
    ord("N"): _constant(None), 0x88: _constant(True), 0x89: _constant(False),
    ord("K"): _integer(1), ord("M"): _integer(2), ord("J"): _integer(4, signed=True),
    0x8A: _sized(1, _long), 0x8B: _sized(4, _long),
    ord("G"): lambda m: m.stack.append(struct.unpack(">d", m.take(8))[0]),
    ord("X"): _sized(4, _text), 0x8C: _sized(1, _text), 0x8D: _sized(8, _text),
    ord("T"): _sized(4, _text), ord("U"): _sized(1, _text),  # strings of Python 2
    ord("B"): _sized(4, bytes), ord("C"): _sized(1, bytes), 0x8E: _sized(8, bytes), 0x96: _sized(8, bytearray),
    ord("]"): lambda m: m.push_new([]), ord("}"): lambda m: m.push_new({}), 0x8F: lambda m: m.push_new(set(), cost=4),
    ord(")"): _constant(()), 0x85: _tuple(1), 0x86: _tuple(2), 0x87: _tuple(3),
    ord("t"): lambda m: m.push_new(tuple(m.pop_mark())),
    0x91: lambda m: m.push_new(frozenset(map(key, m.pop_mark()))),
    ord("a"): lambda m: _append(m, [m.stack.pop()]), ord("e"): lambda m: _append(m, m.pop_mark()),
    ord("s"): lambda m: _set_items(m, [m.stack.pop(-2), m.stack.pop()]), ord("u"): lambda m: _set_items(m, m.pop_mark()),
    0x90: _add,
    ord("("): _mark, ord("0"): _pop, ord("1"): lambda m: _skip(m.pop_mark()),
    ord("2"): lambda m: m.stack.append(m.stack[-1]),
    ord("c"): _global, 0x93: _stack_global, ord("Q"): lambda m: m.push_new(m.persistent(m.stack.pop())),
    ord("R"): lambda m: _call(m, m.stack.pop()), 0x81: lambda m: _call(m, m.stack.pop()), 0x92: _call_with_keywords,
    ord("b"): _build,
    ord("q"): lambda m: _remember(m, m.number(1)), ord("r"): lambda m: _remember(m, m.number(4)),
    0x94: lambda m: _remember(m, len(m.memo)),
    ord("h"): lambda m: m.stack.append(m.memo[m.number(1)]), ord("j"): lambda m: m.stack.append(m.memo[m.number(4)]),
}  # fmt: skip
