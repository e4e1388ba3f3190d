"""All of it on one machine, in the foreground or detached: `draftfleet up`, `down`, `logs`."""
