"""A run's numbers, one JSON object a line: written by rank 0, readable while the run goes on."""

import json
from pathlib import Path
from typing import Any, TextIO


class Metrics:
    """Appends to `metrics.jsonl`. Numbers that are not finite become null: JSON has no word for them."""

    def __init__(self, path: Path | None):
        self.file: TextIO | None = path.open("a") if path else None

    def write(self, **record: Any) -> None:
        if self.file:
            clean = {k: None if isinstance(v, float) and v - v != 0 else v for k, v in record.items()}
            self.file.write(json.dumps(clean) + "\n")
            self.file.flush()

    def close(self) -> None:
        if self.file:
            self.file.close()
