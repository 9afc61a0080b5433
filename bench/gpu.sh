#!/usr/bin/env bash
# Checks groupline on one GPU and measures it: under 8 minutes, no network, no model folder. Needs torch with CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
PYTHON=${PYTHON:-python3}
for part in check rollout step; do
    timeout 150 "$PYTHON" bench/gpu.py "$part" "$@" || echo "$part: failed or ran past 150 s"
done
