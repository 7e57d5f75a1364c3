"""Fuzz targets of what people write: plans, recipes, clusters, token indexes, chat templates, command lines."""

from tests.fuzz.harness import Target

TARGETS: list[Target] = []
