"""`draftfleet generate`: the whole fleet as one command in the foreground, for a person with a script and a file."""
