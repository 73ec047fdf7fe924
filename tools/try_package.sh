#!/usr/bin/env bash
# Installs a package into an environment of its own and uses it there as README does, from the package
# alone: try_package.sh PYTHON FILE
set -euo pipefail
python="$(command -v "$1")"
package="$(realpath "$2")"
root="$(cd "$(dirname "$0")/.." && pwd)"
folder="$(mktemp -d)"
cluster=
ended() {
  [ -z "$cluster" ] || kill "$cluster" 2>/dev/null || true
  rm -rf "$folder"
}
trap ended EXIT
"$python" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet --disable-pip-version-check "$package[demo]"
# README's program without a framework, as the page prints it.
"$python" - "$root/README.md" "$root"/docs/quickstart/numpy.md >"$folder/worker.py" <<'PYTHON'
import pathlib, re, sys
pages = [pathlib.Path(name) for name in sys.argv[1:]]
text = "\n".join(page.read_text() for page in pages if page.exists())
blocks = re.findall(r"```python\n(.*?)```", text, re.S)
print(next(block for block in blocks if "worker_count=2" in block and "torch" not in block and "connect(" in block))
PYTHON
cd "$folder"
export PATH="$folder/env/bin:$PATH" OMP_NUM_THREADS=1
shardwell --version
shardwell cluster --shard-count 2 >"$folder/printed" &
cluster=$!
for _ in $(seq 300); do
  grep -q '^export SHARDWELL_SHARDS=' "$folder/printed" && break
  sleep 0.1
done
eval "$(grep '^export SHARDWELL_SHARDS=' "$folder/printed")"
python worker.py w0 &
worker=$!
python worker.py w1
wait "$worker"
shardwell status
kill -TERM "$cluster"
wait "$cluster" || [ $? -eq 143 ]
cluster=
shardwell demo
