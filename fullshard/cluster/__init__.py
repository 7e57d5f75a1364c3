"""Facts about machines: published numbers, measured ones, and the calibration of the planner."""

from fullshard.cluster.hardware import ClusterError
from fullshard.cluster.topology import Cluster

__all__ = ["Cluster", "ClusterError"]
