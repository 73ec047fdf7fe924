#!/usr/bin/env bash
# Makes client/shardwell/v1 from protos/. With --check: fails if what is committed is not what it makes.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
target=client
if [[ ${1:-} == --check ]]; then
  target=$(mktemp -d)
  trap 'rm -rf "$target"' EXIT
fi
"$python" -m grpc_tools.protoc -Iprotos --python_out="$target" --pyi_out="$target" \
  --grpc_python_out="$target" protos/shardwell/v1/*.proto
if [[ ${1:-} == --check ]]; then
  for made in "$target"/shardwell/v1/*; do
    diff -q "$made" "client/shardwell/v1/$(basename "$made")" ||
      { echo "stubs are stale: run 'make protos' and commit client/shardwell/v1"; exit 1; }
  done
fi
