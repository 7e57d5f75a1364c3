"""The one exception a user of fullshard has to know, and the exit codes of the command line."""

REFUSED = 2  # bad input, or a plan that cannot be honoured: nothing was done
DIVERGED = 3  # training diverged; the last good checkpoint stands
HUNG = 4  # ranks waited for each other for too long
LOST = 75  # this rank's connection to another broke; that rank knows why


class FullshardError(Exception):
    """Bad input or a plan that cannot be honoured: one sentence that says what to write instead.

    The command line prints the sentence and exits with `exit_code`; nothing has been half-done.
    """

    exit_code = REFUSED


def nearest(word: str, known: list[str]) -> str:
    """`; did you mean 'x'?` when a known word is close, and nothing otherwise."""
    import difflib

    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
