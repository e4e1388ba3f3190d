"""What has to hold after every fault: each row is there once, the account adds up, little was asked twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from draftfleet.accounting import Accountant
from draftfleet.outcomes import best
from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.testing.running import Remote
from draftfleet.testing.workers import WorkerProcess


def assert_complete(run: Run, prompts: Sequence[Prompt], *, num_failed: int = 0) -> None:
    """Every row once, no others, as many failed as should; and the account agrees."""
    samples = [sample for name in run.done() for sample in run.read_samples(name)]
    assert Counter(sample.row_key for sample in samples) == Counter(prompt.row_key for prompt in prompts)
    errors = [sample.error for sample in samples if sample.outcome == "failed"]
    assert len(errors) == num_failed, errors
    account = Accountant(run).account()
    assert account.holds
    assert (account.pending, account.failed) == (0, num_failed)
    assert account.ok + account.truncated == len(best(samples)) - num_failed


def num_asked_again(prompts: Sequence[Prompt], servers: Sequence[Remote], workers: Sequence[WorkerProcess]) -> int:
    """Requests beyond one per row and one per canary: what the faults cost. Every row must be done."""
    requests = sum(server.stats(rows=False)["requests"] for server in servers)
    canaries = sum(len(worker.said("canary passed")) for worker in workers)
    return requests - canaries - len(prompts)


def num_kept(run: Run) -> int:
    """Rows that stand in the storage, in a shard or in a partial: nobody has to ask them again."""
    shards = [sample.row_key for name in run.done() for sample in run.read_samples(name)]
    partials = [sample.row_key for name in run.partials() for sample in run.read_partial(name)]
    return len({*shards, *partials})
