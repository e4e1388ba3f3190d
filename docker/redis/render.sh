#!/bin/sh
# Write the ACL file of Redis to standard output: users.acl with the hashes of the passwords put in.
#   sh docker/redis/render.sh FOLDER > users.acl
# FOLDER holds one password per file: redis_admin, redis_producer, redis_worker, redis_trainer, redis_flower.
set -eu
folder=$1
template=${2:-$(dirname "$0")/users.acl}

script=""
for user in admin producer worker trainer flower; do
  file=$folder/redis_$user
  [ -s "$file" ] || { echo "render.sh: $file is missing or empty: it should hold the password of $user" >&2; exit 1; }
  hash=$(tr -d '\r\n' <"$file" | sha256sum | cut -d ' ' -f 1)
  script="$script;s/@$user@/#$hash/"
done

# A user is one line for Redis; comments are for people.
sed -e '/^#/d' -e '/^$/d' -e "${script#;}" "$template" | awk '
  /^user / { if (line) print line; line = $0; next }
  { sub(/^ +/, " "); line = line $0 }
  END { print line }'
