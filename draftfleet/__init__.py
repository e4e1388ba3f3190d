"""The contract of draftfleet: what the producer, the workers and the trainer agree on. No role, no torch."""

__version__ = "0.1.0"
