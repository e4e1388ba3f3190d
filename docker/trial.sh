#!/bin/sh
# The way from end to end, beside a worker and a trainer that run already: what compose.yaml's service `trial` does.
set -eu
draftfleet produce /prompts/prompts.jsonl
draftfleet train
while true; do
  code=0
  draftfleet status --json | python -c '
import json, sys
state = json.load(sys.stdin)
drafter = state["drafters"].get("default", {})
print(state["ok"], "answers,", state["pending"], "pending, drafter at step", drafter.get("step", 0), file=sys.stderr)
if drafter.get("state") == "failed":
    sys.exit(8)
sys.exit(state["pending"] != 0 or drafter.get("state") != "finished")' || code=$?
  case $code in
    0) break ;;
    1) sleep 5 ;;
    *) exit "$code" ;;
  esac
done
draftfleet evaluate
draftfleet export
