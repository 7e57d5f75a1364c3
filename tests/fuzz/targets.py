"""All fuzz targets, by name."""

from tests.fuzz import checkpoint_targets, text_targets
from tests.fuzz.harness import Target

TARGETS: dict[str, Target] = {t.name: t for t in (*text_targets.TARGETS, *checkpoint_targets.TARGETS)}
