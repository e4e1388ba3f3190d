#!/bin/sh
# Make the passwords of compose.yaml, each at random in a file of its own. Those that are there stay.
# hf_token is made empty: write your token of the Hugging Face Hub into it if the target is read from there.
#   sh docker/secrets.sh [FOLDER]
# The folder is for its owner alone. The files in it can be read by all: containers run as other users, and Compose
# mounts each of them into the containers that need it.
set -eu
folder=${1:-$(dirname "$0")/secrets}

umask 077
mkdir -p "$folder"
for name in redis_admin redis_producer redis_worker redis_trainer redis_flower flower grafana; do
  file=$folder/$name
  [ -s "$file" ] && continue
  od -An -N24 -tx1 /dev/urandom | tr -d ' \n' >"$file"
  chmod 444 "$file"
  echo "made $file"
done
[ -e "$folder/hf_token" ] || install -m 644 /dev/null "$folder/hf_token"
