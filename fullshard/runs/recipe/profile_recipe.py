"""The recipe of `fullshard profile`: the same steps, and nothing between them but the profile."""

from fullshard.runs.recipe.recipe import Recipe, make_recipe

WARM_UP = 2  # steps before the profile: the first one checks, compiles and fills the allocator


def profile_recipe(recipe: Recipe, steps: int) -> Recipe:
    """A run of a few steps that are as those of `recipe`. It saves nothing, evaluates nothing and writes no samples."""
    tree = recipe.model_dump()
    for section in ("eval", "sample", "log", "schedule"):
        del tree[section]
    tree["data"]["valid"] = None
    tree["train"] |= {"steps": WARM_UP + steps, "tokens": None}
    tree["checkpoint"] = {"minutes": 0.0, "final": False}
    tree["schedule"] = {"kind": "constant"}
    tree["profile"] = {"at": WARM_UP + 1, "steps": steps}
    return make_recipe(tree, "the recipe of the profile")
