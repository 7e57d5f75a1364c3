"""Fuzz targets of what files claim: manifests, safetensors headers, pickles of `.pt`, DCP and DeepSpeed."""

from tests.fuzz.harness import Target

TARGETS: list[Target] = []
