"""Cluster files that ship, as data: see `crossfed.platform.cluster.files`."""
