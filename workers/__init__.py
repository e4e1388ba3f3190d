"""From the queue to a shard."""
