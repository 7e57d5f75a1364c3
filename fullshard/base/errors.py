"""The exception that users of fullshard catch, the exit codes, and checks that public functions share."""

import functools
import inspect
import math
import signal
from collections.abc import Callable
from numbers import Real
from typing import Any, ParamSpec, TypeVar

FAILED = 1  # an unexpected error, or what cannot be kept or had just now
REFUSED = 2  # bad input, or a plan that cannot be honoured: nothing was done
DIVERGED = 3  # training diverged; the last good checkpoint is kept
HUNG = 4  # ranks waited too long for each other
LOST = 75  # the connection to another rank broke; that rank reports why
SAVED_TO_GO_ON = 85  # a scheduler asked by SIGUSR1 for an end: saved, and the same command goes on

LONGEST = 1000  # characters of an error message
# Control characters from files and arguments could change what a terminal shows.
ESCAPED = {code: f"\\x{code:02x}" for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}


def code_of_signal(number: int) -> int:
    """The exit code of a run that obeyed a signal."""
    return SAVED_TO_GO_ON if number == signal.SIGUSR1 else 128 + number


class FullshardError(Exception):
    """Bad input, or a plan that cannot be honoured. The message is one sentence that says what to write instead.

    The command line prints the sentence and exits with `exit_code`; no partial result is left. The middle of a very long
    message is left out.
    """

    exit_code = REFUSED

    def __init__(self, sentence: object = ""):
        super().__init__(_readable(str(sentence)))


class AgreedError(FullshardError):
    """An error that all ranks of a run raise alike. Its sentence names the rank that it came from, where that matters; its exit
    code is that of the error there."""

    def __init__(self, sentence: object = "", code: int = REFUSED):
        super().__init__(sentence)
        self.exit_code = code


class HostMemoryError(FullshardError):
    """This machine has not enough host memory just now: another start may find more."""

    exit_code = FAILED


def _readable(sentence: str) -> str:
    if len(sentence) > LONGEST:
        sentence = f"{sentence[: LONGEST // 2]} … {sentence[-LONGEST // 2 :]}"
    return sentence.translate(ESCAPED)


def first_line(error: BaseException) -> str:
    """The first line of another library's error message, to be quoted in a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def attempt(make: Callable[[], Any]) -> tuple[bool, Any]:
    """(True, result) or (False, [error sentence, exit code]). Catches bugs too: the other ranks would wait forever otherwise."""
    try:
        return True, make()
    except FullshardError as error:
        return False, [str(error), error.exit_code]
    except Exception as error:
        return False, [f"{type(error).__name__}: {first_line(error)}", FAILED]


def unwrap(outcomes: list[Any]) -> list[Any]:
    """The results of `attempt`. Raises the first error among them."""
    failed = [value for succeeded, value in outcomes if not succeeded]
    if failed:
        raise AgreedError(*failed[0])
    return [value for _, value in outcomes]


def nearest(word: str, known: list[str]) -> str:
    """`; did you mean 'x'?` if a known word is close, otherwise nothing."""
    import difflib

    close = difflib.get_close_matches(word[:LONGEST], known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


P = ParamSpec("P")
T = TypeVar("T")


def checked_call(call: str, **kinds: type | tuple[type, ...]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator for public functions. Arguments that are missing, unknown or not of the types in `kinds` raise an error
    that shows `call`, an example of the right call."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
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

    return decorate


def a_kind(value: object) -> str:
    """The type of a value with its article, as in `an int`."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def is_number(value: object) -> bool:
    """True if `value` is a finite number, and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def expect_number(name: str, value: object, *, zero: bool = True) -> None:
    """Raise unless `value` is a finite number of at least 0. Without `zero`, 0 raises too."""
    if not is_number(value) or value < 0 or (value == 0 and not zero):  # type: ignore[operator]
        raise FullshardError(f"{name} must be a number {'of at least' if zero else 'above'} 0, not {value!r}")
