"""Cluster files that ship, as data: see `crossfed.platform.cluster_file`."""
