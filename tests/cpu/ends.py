"""What runs inside ranks for test_ends.py."""

from fullshard.base.errors import FullshardError
from fullshard.on_torch.engine.ranks import agreement
from fullshard.runs.prepare.prepare import prepare
from fullshard.runs.prepare.rank_identity import identity, refuse_disagreement
from fullshard.runs.recipe.recipe import load_recipe


def compare(here: str, told: list[list[str]], options: list[tuple[str, str | None]]) -> str:
    """Each rank prepares a run with overrides, a directory and a `--resume` of its own; what it is refused with."""
    import os

    import torch.distributed as dist

    rank = dist.get_rank()
    os.chdir(here)
    prepared = prepare(load_recipe("recipe.toml", told[rank]), dist.get_world_size())
    try:
        told = {"--run": options[rank][0], "--resume": options[rank][1]}
        refuse_disagreement(identity(prepared.recipe, prepared, prepared.engine) | told, prepared.engine.ranks)
    except FullshardError as error:
        return str(error)
    return "agreed"


def compare_codes(directories: list[str]) -> str:
    """Each rank prepares the same recipe in a directory of its own; what it is refused with."""
    import torch.distributed as dist

    return compare(directories[dist.get_rank()], [[], []], [("runs/a", None)] * 2)


def prepare_together(here: str, told: list[list[str]]) -> str:
    """As `fullshard train` begins on ranks that somebody started."""
    import os

    import torch.distributed as dist

    os.chdir(here)
    try:
        agreement().all_or_none(lambda: prepare(load_recipe("recipe.toml", told[dist.get_rank()]), dist.get_world_size()))
    except FullshardError as error:
        return str(error)
    return "prepared"


def dies_while_comparing() -> bool:
    """Rank 1 was told something else, and dies when it hears what rank 0 was told. Whether rank 0 hears that it is gone."""
    import os

    import torch.distributed as dist

    from fullshard.engine.engine import load_engine
    from fullshard.on_torch.ranks.first_failure import lost_a_peer
    from fullshard.on_torch.ranks.store_messages import StoreClient

    rank = dist.get_rank()
    if rank == 1:
        StoreClient.get = lambda self, key: os._exit(9)
    try:
        refuse_disagreement({"train.seed": rank}, load_engine("torch").ranks)
    except Exception as error:
        return lost_a_peer(error)
    return False
