#!/usr/bin/env bash
# Real math, end to end, on a CPU: train on GSM8K and MATH with the embedded engine and with vLLM, evaluate on six sets,
# resume with one more, and score the result alone.
#
#   examples/real_math.sh [DATA] [OUT]
#
# DATA (default: data) holds NAME/train.jsonl and NAME/test.jsonl as `dppo-megatron data NAME --out DATA/NAME` writes
# them; missing sets are downloaded that way. vLLM is used if DPPO_VLLM_PYTHON names the python of its environment
# (`make .venv-vllm/.installed`, then .venv-vllm/bin/python). Without downloads it takes two and a half minutes on two
# idle cores.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)/real_math
data=${1:-data} out=${2:-runs/real_math}

for name in gsm8k math math500 amc23 aime24 aime25 minerva olympiadbench; do
  [ -e "$data/$name" ] || dppo-megatron data "$name" --out "$data/$name"
done
python "$here/prepare.py" --gsm8k "$data/gsm8k/train.jsonl" --math "$data/math/train.jsonl" --out "$out"

settings=("$here/job.yaml" "model.hf_path=$out/model" "sft.examples_path=$out/sft.jsonl"
  "data.train_sets.gsm8k.path=$out/gsm8k.jsonl" "data.train_sets.math.path=$out/math.parquet")
for name in math500 amc23 aime24 aime25 minerva olympiadbench; do
  settings+=("data.eval_sets.$name.path=$data/$name/test.jsonl" "data.eval_sets.$name.limit=16"
    "data.eval_sets.$name.max_prompt_tokens=900")
done

dppo-megatron train "${settings[@]}" "run_dir=$out/hf"
if [ -n "${DPPO_VLLM_PYTHON:-}" ]; then
  dppo-megatron train "${settings[@]}" "run_dir=$out/vllm" rollout.engine=vllm rollout.servers.launch=local \
    "rollout.servers.python=$DPPO_VLLM_PYTHON"
fi
# the same command with one more step and one more set: resumes at step 3
dppo-megatron train "${settings[@]}" "run_dir=$out/hf" steps=4 \
  "data.eval_sets.gsm8k.path=$data/gsm8k/test.jsonl" data.eval_sets.gsm8k.limit=16 \
  data.eval_sets.gsm8k.max_prompt_tokens=900
dppo-megatron eval "$out/hf" --out "$out/eval"
