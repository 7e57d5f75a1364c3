"""`fullshard bench`: the product of some choices of a recipe, each case in fresh ranks, measured and predicted."""
