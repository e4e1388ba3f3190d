"""From a data set to the queue."""
