"""`draftfleet export-data`: the samples of a run as a data set that other programs read.

shards -> kept (each row once, its best record) -> units (what becomes one line) -> a format's writer -> files
                                                                          + tally -> card, export.json -> hub
"""
