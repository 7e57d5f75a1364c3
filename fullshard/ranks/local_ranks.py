"""The ranks of one machine, as launchers tell it in the environment."""

import os


def ranks_here(otherwise: int = 1) -> int:
    """The number of ranks on this machine; `otherwise` if no launcher says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", otherwise))
