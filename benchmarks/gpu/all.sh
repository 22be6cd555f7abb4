#!/bin/bash
# All figures of one H200 in ten minutes; an H100 of 80 GB has no room for 4B. Never run as a whole; docs/performance.md has one row.
set -e
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
B="python benchmarks/gpu/train_step.py"; Q="--warmup-steps 2 --timed-steps 3"
$B packed-vs-padded --shapes 0.6b --samples 48 $Q --json packed_vs_padded.json
for spec in local te; do
  $B mfu --shapes 0.6b --sequence-tokens 4096 16384 --microbatches 4 $Q --layer-spec $spec --json mfu_0.6b_$spec.json
  $B mfu --shapes 4b --max-tokens-per-microbatch 8192 --sequence-tokens 4096 8192 --microbatches 8 $Q --layer-spec $spec \
    --json mfu_4b_$spec.json
done
$B mfu --shapes 4b --max-tokens-per-microbatch 8192 --sequence-tokens 8192 --microbatches 8 $Q --logprob-kernel torch \
  --json mfu_4b_torch_head.json    # to compare with the same row with the fused kernels, which are the default
$B fp8 --shapes 4b --layer-spec te --samples 48 --max-tokens 7900 --max-tokens-per-microbatch 8192 \
  --recipes tensorwise blockwise $Q --json fp8.json
$B memory --shapes 4b --max-tokens-per-microbatch 8192 --sequence-tokens 1024 --microbatches 2 $Q --json memory.json
