"""What finished and deleted runs leave in Redis and in `partial/` goes away. By the reconciler, again and again.

A run is finished when it is sealed and nothing of it is outstanding. Nobody needs then when its batches were published,
how often their claims lapsed, and the rows of its partials: every row has its outcome in a shard or a dead letter.
Trainings go on after that, so their claims, attempts and messages stay.
"""

from __future__ import annotations

import logging

import redis

from draftfleet.claims import published_key
from draftfleet.logs import event
from draftfleet.runs import TOMBSTONES, Run
from draftfleet.storage import Storage

log = logging.getLogger(__name__)

# A claim on a batch of a finished run is of a second delivery, and goes by itself. One on a drafter needs all of it.
_TIDY = """
local left = 0
for _, key in ipairs({KEYS[1], KEYS[2]}) do  -- attempts, published
  for _, field in ipairs(redis.call('HKEYS', key)) do
    if string.sub(field, 1, 6) ~= 'train:' and redis.call('HEXISTS', KEYS[3], field) == 0 then
      left = left + redis.call('HDEL', key, field)
    end
  end
end
if redis.call('EXISTS', KEYS[1], KEYS[3]) == 0 then redis.call('DEL', KEYS[4]) end
return left
"""


def tidy(client: redis.Redis, run: Run) -> None:
    """Remove what a finished run has left. Its shards, prompts, dead letters and drafters stay."""
    prefix = f"draftfleet:{run.run_id}"
    keys = [f"{prefix}:attempts", published_key(run.run_id), f"{prefix}:claims", f"{prefix}:server"]
    fields = int(client.register_script(_TIDY)(keys))
    partials = run.partials()
    for name in partials:
        run.delete_partial(name)
    if fields or partials:
        log.info(event("run tidied up", run=run.name, redis_fields=fields, partials=len(partials)))


def remove_keys(client: redis.Redis, storage: Storage) -> int:
    """Remove what deleted runs have in Redis, also what a worker that was frozen at the deletion put there later."""
    stones = {name.removesuffix(".json") for name in storage.list(TOMBSTONES)}
    if not stones:
        return 0
    names = (str(key) for key in client.scan_iter("draftfleet:*:*", count=1000))
    keys = [key for key in names if key.split(":")[1] in stones]
    return int(client.delete(*keys)) if keys else 0
