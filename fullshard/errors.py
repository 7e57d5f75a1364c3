"""The one exception a user of fullshard has to know, and the checks that public functions share."""

import functools
import inspect
import math
from collections.abc import Callable
from numbers import Real
from typing import ParamSpec, TypeVar


class FullshardError(Exception):
    """Bad input or a plan that cannot be honoured: one sentence that says what to write instead.

    The command line prints the sentence and exits with code 2; nothing has been half-done.
    """


def nearest(word: str, known: list[str]) -> str:
    """`; did you mean 'x'?` when a known word is close, and nothing otherwise."""
    import difflib

    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


P = ParamSpec("P")
T = TypeVar("T")


def door(call: str, **kinds: type | tuple[type, ...]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """For a public function: arguments that are missing, unknown or of another kind than in `kinds` get a sentence that
    shows `call`, how it is written."""

    def around(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise FullshardError(f"{function.__name__}: {error}; write {call}") from None
            for name, kind in kinds.items():
                if name in given and not isinstance(given[name], kind):
                    raise FullshardError(f"{function.__name__}: {name} cannot be {a_kind(given[name])}; write {call}")
            return function(*args, **kwargs)

        return checked

    return around


def a_kind(value: object) -> str:
    """What a value is, in words."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def expect_number(name: str, value: object, *, zero: bool = True) -> None:
    """Raise unless `value` is a finite number, of at least 0 or, without `zero`, above it."""
    well = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not well or value < 0 or (value == 0 and not zero):  # type: ignore[operator]
        raise FullshardError(f"{name} must be a number {'of at least' if zero else 'above'} 0, not {value!r}")
