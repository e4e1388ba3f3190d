"""From shards to a drafter."""
