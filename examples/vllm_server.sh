#!/usr/bin/env bash
# A vLLM server that a trainer can use: examples/vllm_server.sh MODEL [PORT] [more arguments of vLLM]
# Then: dppo-megatron train CONFIG rollout.engine=vllm rollout.servers.endpoints='[http://127.0.0.1:8000]' \
#         rollout.servers.launch=none rollout.servers.colocate=false
# With VLLM_API_KEY set it asks for that key at every path, and the trainer needs it as DPPO_ENGINE_API_KEY. Without it
# the development endpoints take weights from whoever reaches the port (docs/security.md): keep it on loopback.
set -euo pipefail
model=$1 port=${2:-8000}
shift $(($# > 1 ? 2 : 1))
here=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$here/dppo_megatron/rollout/servers/in_engine VLLM_SERVER_DEV_MODE=1
guard=(${VLLM_API_KEY:+--middleware dppo_vllm_guard.RequireKey})
exec vllm serve "$model" --host 127.0.0.1 --port "$port" --enable-scale-out \
  --logprobs-mode processed_logprobs --generation-config vllm \
  --worker-extension-cls dppo_vllm_extension.WorkerExtension --weight-transfer-config '{"backend": "dppo"}' "${guard[@]}" \
  --middleware dppo_vllm_arrays.Arrays "$@"
