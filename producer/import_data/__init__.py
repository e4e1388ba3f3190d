"""Responses that somebody has paid for become samples of a run: `draftfleet import-data` (docs/import-data.md).

files: lines -> forms: responses -> slots: whose prompts -> answers: samples -> writing: shards and partials
"""
