"""Messages between ranks without collectives, through the key-value store that the ranks met in.

A collective needs every rank to take part. Ranks that disagree, fail or hang cannot rely on that, so they write and poll
keys of the store instead.
"""

import json
from typing import Any

import torch.distributed as dist

from fullshard.on_torch.private.torch_internals import default_store
from fullshard.ranks.messages import PolledMessages


class StoreClient(PolledMessages):
    """One thread's own connection to the ranks' store. Values are JSON."""

    def __init__(self, store: dist.Store | None = None):
        own = store or default_store()
        self.store = own.clone() if hasattr(own, "clone") else own

    def put(self, key: str, value: Any) -> None:
        self.store.set(f"fullshard/{key}", json.dumps(value))

    def get(self, key: str) -> Any:
        """The value of `key`, or None if it was never put."""
        full = f"fullshard/{key}"
        return json.loads(self.store.get(full)) if self.store.check([full]) else None

    def claim(self, key: str) -> bool:
        return self.store.add(f"fullshard/{key}", 1) == 1
