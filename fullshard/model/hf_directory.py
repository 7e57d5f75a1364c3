"""Hugging Face directories, as far as all engines read them alike. They are untrusted input: no code of theirs runs."""

import re
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError, nearest
from fullshard.base.reading import is_directory, is_plain_file, parse_json, read_text
from fullshard.model.presets import PRESETS

MOST_BYTES = 16 << 20  # of a config
# Keys of a config that no engine honours, and why.
REFUSED_KEYS = {
    "auto_map": "names code in the model's directory, which is not run; remove the key",
    "quantization_config": "asks for quantised weights, which cannot be trained; use the model's unquantised directory",
}
COMPUTED = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")  # tensors of old files, which today's models compute


def config_file(path: Path) -> Path:
    """The config.json of a directory, or the file itself. Raises where there is none."""
    found = path / "config.json" if is_directory(path) else path
    if not is_plain_file(found):
        raise FullshardError(f"{path} has no config.json; write the directory of a Hugging Face model")
    return found


def parse_config(path: Path) -> dict[str, Any]:
    """The fields of a config.json, none of them checked. Raises if it is not a JSON object."""
    text = read_text(path, "config", MOST_BYTES)
    try:
        found = parse_json(text)
    except FullshardError as error:
        raise FullshardError(f"{path} is not a Hugging Face config: {error}") from None
    if not isinstance(found, dict):
        raise FullshardError(f"{path} is not a Hugging Face config: it is a JSON {type(found).__name__}, not an object")
    return found


def unknown_model(name: str) -> FullshardError:
    """For a name that is neither a preset nor a path nor a callable."""
    known = f"a preset ({', '.join(PRESETS)}), a directory with a config.json, or file.py:callable"
    return FullshardError(f"unknown model {name!r}; write {known}{nearest(name, list(PRESETS))}")
