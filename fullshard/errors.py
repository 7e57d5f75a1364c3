"""The one exception a user of fullshard has to know."""


class FullshardError(Exception):
    """Bad input or a plan that cannot be honoured: one sentence that says what to write instead.

    The command line prints the sentence and exits with code 2; nothing has been half-done. Where it is no input that is
    wrong, a subclass has another `exit_code`.
    """

    exit_code = 2


def nearest(word: str, known: list[str]) -> str:
    """`; did you mean 'x'?` when a known word is close, and nothing otherwise."""
    import difflib

    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
