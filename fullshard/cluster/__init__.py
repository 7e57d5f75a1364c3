"""Facts about machines: published numbers, measured ones, and the calibration of the planner."""

from fullshard.cluster.cluster import Cluster
from fullshard.cluster.hardware import ClusterError

__all__ = ["Cluster", "ClusterError"]
