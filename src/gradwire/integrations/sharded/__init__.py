"""Models whose parameters are sharded by FSDP2 (`fully_shard`)."""

from gradwire.integrations.sharded.reduce_scatter import compress_reduce_scatter

__all__ = ["compress_reduce_scatter"]
