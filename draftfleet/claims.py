"""Claims: the right to work on a batch, or to train a drafter. Held in Redis, renewed, and counted when they lapse.

Each step is one script, so that two processes never both hold a claim by Redis' account. An attempt is counted only
when a claim lapsed without release and without a new finished row: draining, pausing and a restarted Redis cost none.
Nobody can renew while Redis is away, so after its restart every claim gets its full time again.

    draftfleet:RUN_ID:claims     hash  name -> [token, owner, expires (ms), saved rows]
    draftfleet:RUN_ID:attempts   hash  name -> attempts that lapsed without progress
    draftfleet:RUN_ID:server     hash  id, since (ms): the Redis that was seen last, 0 for the first of all
    draftfleet:RUN_ID:published  hash  batch -> when it was last published (s); written by draftfleet.queue
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import redis

from draftfleet import settings

Renewal = Literal["kept", "retaken", "lost"]


@dataclass(frozen=True, slots=True)
class Taken:
    """The claim is ours. `attempt` counts from 1."""

    token: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Held:
    """Another process is at work on it."""

    owner: str


@dataclass(frozen=True, slots=True)
class Holding:
    """What a holder says when it renews: its token, and how many finished rows it has put on storage."""

    token: str
    saved_rows: int = 0


@dataclass(frozen=True, slots=True)
class Lapsed:
    """A claim that was not renewed in time, and how many attempts have now ended without progress.

    `others` are the claims that its holder had besides: any of them may be why it ended.
    """

    name: str
    attempts: int
    others: int = 0


# Time is Redis' own, so that no two nodes' clocks are ever compared.
_NOW = "local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000);"

# A claim found lapsed counts as an attempt unless rows were saved under it; a later save forgives the earlier ones.
_LAPSE = """
local function lapse(claims, attempts, name, claim)
  redis.call('HDEL', claims, name)
  if claim[4] > 0 then redis.call('HDEL', attempts, name); return 0 end
  return redis.call('HINCRBY', attempts, name, 1)
end
"""

# Another id is another process with the same data: restarted, or the replica that took over.
_IS_LIVE = """
local function started(key, now)
  local info = redis.pcall('INFO', 'server')
  local id = type(info) == 'string' and string.match(info, 'run_id:(%w+)') or 'unknown'
  local seen = redis.call('HMGET', key, 'id', 'since')
  if seen[1] == id then return tonumber(seen[2]) end
  local since = seen[1] and now or 0
  redis.call('HSET', key, 'id', id, 'since', string.format('%.0f', since))
  return since
end
local function is_live(claim, since, now, ttl)
  return claim[3] > now or now - since < ttl
end
"""

_TAKE = (
    _NOW
    + _LAPSE
    + _IS_LIVE
    + """
local since = started(KEYS[4], now)
local raw = redis.call('HGET', KEYS[1], ARGV[1])
local claim = raw and cjson.decode(raw)
if claim and claim[1] ~= ARGV[2] then  -- the answer to an earlier call with this token may have been lost
  if is_live(claim, since, now, tonumber(ARGV[4])) then return {0, claim[2]} end
  lapse(KEYS[1], KEYS[2], ARGV[1], claim)
end
redis.call('HSET', KEYS[1], ARGV[1], cjson.encode({ARGV[2], ARGV[3], now + ARGV[4], 0}))
return {1, (redis.call('HGET', KEYS[2], ARGV[1]) or 0) + 1}
"""
)

_RENEW = (
    _NOW
    + """
local raw = redis.call('HGET', KEYS[1], ARGV[1])
local answer = 'kept'
if not raw then
  answer = 'retaken'
  -- A sweep took its holder for dead, and nobody had it since: that was no attempt.
  if redis.call('HINCRBY', KEYS[2], ARGV[1], -1) <= 0 then redis.call('HDEL', KEYS[2], ARGV[1]) end
elseif cjson.decode(raw)[1] ~= ARGV[2] then
  return 'lost'
end
redis.call('HSET', KEYS[1], ARGV[1], cjson.encode({ARGV[2], ARGV[3], now + ARGV[4], tonumber(ARGV[5])}))
return answer
"""
)

_RELEASE = """
local raw = redis.call('HGET', KEYS[1], ARGV[1])
if not raw or cjson.decode(raw)[1] ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
return 1
"""

_SWEEP = (
    _NOW
    + _LAPSE
    + _IS_LIVE
    + """
local since = started(KEYS[4], now)
local lapsed, held = {}, {}
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local owner = cjson.decode(all[i + 1])[2]
  held[owner] = (held[owner] or 0) + 1
end
local ended = {}
for i = 2, #ARGV do ended[ARGV[i]] = true end
for i = 1, #all, 2 do
  local claim = cjson.decode(all[i + 1])
  if ended[claim[2]] or not is_live(claim, since, now, tonumber(ARGV[1])) then
    lapsed[#lapsed + 1] = all[i]
    lapsed[#lapsed + 1] = lapse(KEYS[1], KEYS[2], all[i], claim)
    lapsed[#lapsed + 1] = held[claim[2]] - 1
    redis.call('HDEL', KEYS[3], all[i])  -- should the caller die now, the batch counts as never published
  end
end
return lapsed
"""
)


def published_key(run_id: str) -> str:
    return f"draftfleet:{run_id}:published"


def new_token() -> str:
    return uuid.uuid4().hex


class Claims:
    """The claims of one run, as seen by one process. Every method may raise redis.RedisError."""

    def __init__(self, client: redis.Redis, run_id: str, knobs: settings.Claims, owner: str) -> None:
        self.owner = owner
        self._ttl_ms = int(knobs.ttl_s * 1000)
        self._client = client
        prefix = f"draftfleet:{run_id}"
        self._keys = [f"{prefix}:claims", f"{prefix}:attempts", published_key(run_id), f"{prefix}:server"]
        self._take = client.register_script(_TAKE)
        self._renew = client.register_script(_RENEW)
        self._release = client.register_script(_RELEASE)
        self._sweep = client.register_script(_SWEEP)

    def take(self, name: str, token: str | None = None) -> Taken | Held:
        """Claim it, unless a live claim is held. Who asks again after an error gives the same `token`."""
        token = token or new_token()
        granted, answer = self._take(self._keys, [name, token, self.owner, self._ttl_ms])
        return Taken(token, int(answer)) if granted else Held(str(answer))

    def renew(self, held: Mapping[str, Holding]) -> dict[str, Renewal]:
        """Renew all that this process holds, in one round trip.

        "retaken": Redis had forgotten the claim, it is ours again. "lost": another process has it now.
        """
        pipeline = self._client.pipeline(transaction=False)
        for name, holding in held.items():
            arguments = [name, holding.token, self.owner, self._ttl_ms, holding.saved_rows]
            self._renew(self._keys, arguments, client=pipeline)
        return dict(zip(held, pipeline.execute(), strict=True))

    def release(self, name: str, token: str) -> bool:
        """Give it back, with no attempt counted. False if it was no longer ours."""
        return bool(self._release(self._keys, [name, token]))

    def holder(self, name: str) -> str | None:
        """The owner of a claim, live or lapsed; None if nobody has one."""
        raw = self._client.hget(self._keys[0], name)
        return None if raw is None else str(json.loads(str(raw))[1])

    def is_ours(self, name: str, token: str) -> bool:
        """Whether the claim still carries this token."""
        raw = self._client.hget(self._keys[0], name)
        return raw is not None and json.loads(str(raw))[0] == token

    def held(self) -> set[str]:
        """Names with a claim, live or lapsed."""
        return {str(name) for name in self._client.hkeys(self._keys[0])}

    def holders(self) -> dict[str, list[str]]:
        """The names with a live claim, by owner."""
        seconds, micros = self._client.time()
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        found: dict[str, list[str]] = {}
        for name, raw in sorted(self._client.hgetall(self._keys[0]).items()):
            _, owner, expires_ms, _ = json.loads(str(raw))
            if expires_ms > now_ms:
                found.setdefault(str(owner), []).append(str(name))
        return found

    def owners(self) -> set[str]:
        """Of all claims, live or lapsed."""
        return {str(json.loads(str(raw))[1]) for raw in self._client.hvals(self._keys[0])}

    def sweep(self, ended: Iterable[str] = ()) -> list[Lapsed]:
        """Remove the lapsed claims, count their attempts, and return them: each to one caller only.

        Claims of owners that are known to have `ended` have lapsed, whatever time they have left.
        """
        flat = self._sweep(self._keys, [self._ttl_ms, *ended])
        triples = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        return [Lapsed(str(name), int(attempts), int(others)) for name, attempts, others in triples]
