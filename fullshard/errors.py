"""The one exception a user of fullshard has to know, and the exit codes of the command line."""

REFUSED = 2  # bad input, or a plan that cannot be honoured: nothing was done
DIVERGED = 3  # training diverged; the last good checkpoint stands
HUNG = 4  # ranks waited for each other for too long
LOST = 75  # this rank's connection to another broke; that rank knows why

LONGEST = 1000  # characters of a sentence: what a person reads
# Control characters come from files and arguments, and could tell a terminal to show something else.
ESCAPED = {code: f"\\x{code:02x}" for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}


class FullshardError(Exception):
    """Bad input or a plan that cannot be honoured: one sentence that says what to write instead.

    The command line prints the sentence and exits with `exit_code`; nothing has been half-done. Of a value that is quoted at
    length the middle is left out.
    """

    exit_code = REFUSED

    def __init__(self, sentence: object = ""):
        super().__init__(_readable(str(sentence)))


def _readable(sentence: str) -> str:
    if len(sentence) > LONGEST:
        sentence = f"{sentence[: LONGEST // 2]} … {sentence[-LONGEST // 2 :]}"
    return sentence.translate(ESCAPED)


def first_line(error: BaseException) -> str:
    """What an exception of somebody else's says, short enough for a sentence of ours."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def nearest(word: str, known: list[str]) -> str:
    """`; did you mean 'x'?` when a known word is close, and nothing otherwise."""
    import difflib

    close = difflib.get_close_matches(word[:LONGEST], known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
