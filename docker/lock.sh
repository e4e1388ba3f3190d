#!/bin/sh
# Pin what the images are made of, with the hash of every file: docker/locks/*.txt, from pyproject.toml.
#   sh docker/lock.sh [OPTION...]      needs uv; options are uv's: --upgrade, --upgrade-package celery
# build: what makes the wheel. core: every image. trainer and trial: what these have beside core.
# torch is in none of them: which build of it is right depends on the machine, so the Dockerfile names its version.
set -eu
cd "$(dirname "$0")/.."
locks=docker/locks
torch=$(sed -n 's/^ARG TORCH=//p' docker/Dockerfile)

names() { sed -n 's/^\([a-z0-9-]*\)==.*/\1/p' "$@"; }

# What `options` leave out is not written, but what is written fits to it.
pin() {
  file=$1
  shift
  UV_CUSTOM_COMPILE_COMMAND="sh docker/lock.sh" uv pip compile --quiet --python-version 3.11 --python-platform linux \
    --generate-hashes --no-annotate --output-file "$locks/$file.txt" "$@"
}

beside() { for name in $(names "$@"); do printf -- '--no-emit-package %s ' "$name"; done; }

printf 'hatchling\npip\n' | pin build - "$@"
pin core pyproject.toml --extra s3 "$@"

all=$(mktemp)
trap 'rm -f "$all"' EXIT
echo "$torch" | uv pip compile --quiet --python-version 3.11 --python-platform linux --no-annotate --no-header - >"$all"
gpu=$(names "$all" | grep -E '^(torch|triton|nvidia-.*|cuda-.*)$')
for name in $gpu; do without="${without-} --no-emit-package $name"; done

echo "$torch" >"$all"
# shellcheck disable=SC2046,SC2086  # lists of options
pin trainer pyproject.toml "$all" --extra s3 --extra trainer --constraint $locks/core.txt $without $(beside $locks/core.txt) "$@"
# shellcheck disable=SC2046,SC2086
pin trial pyproject.toml "$all" --extra s3 --extra trainer --extra demo --constraint $locks/core.txt \
  --constraint $locks/trainer.txt $without $(beside $locks/core.txt $locks/trainer.txt) "$@"
