"""Attention over several processes: sharding of DTensors, ring attention and tensor parallelism."""
