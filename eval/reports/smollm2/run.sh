#!/usr/bin/env bash
# Evaluate SmolLM2-135M-Instruct, its ports to Block 8 and Full, and a fine-tuned port, on HumanEval and perplexity.
# Usage: eval/reports/smollm2/run.sh WORK_FOLDER ADAPTER
# ADAPTER: lora-and-depth-1/adapter in the work folder of training/reports/smollm2/run.sh
set -euo pipefail
clone=$(cd "$(dirname "$0")/../../.." && pwd) work=$1 adapter=$(realpath "$2")
export HF_HUB_OFFLINE=1 PYTHONPATH=$clone
python=$clone/.venv/bin/python

mkdir -p "$work"
cd "$work"
[ -d SmolLM2-135M ] || cp -r "$clone/demo/checkpoints/SmolLM2-135M-Instruct" SmolLM2-135M
[ -d SmolLM2-135M-Block8 ] || $python -m conversion port SmolLM2-135M SmolLM2-135M-Block8 --num-blocks 8 --verify
[ -d SmolLM2-135M-Full ] || $python -m conversion port SmolLM2-135M SmolLM2-135M-Full --mode full --verify
[ -d SmolLM2-135M-Block8-tuned ] || $python -m training merge "$adapter" SmolLM2-135M-Block8-tuned

models=(--model SmolLM2-135M --model SmolLM2-135M-Block8 --model SmolLM2-135M-Full --model SmolLM2-135M-Block8-tuned)
common=(--data data --gen-kwargs max_gen_toks=256 --confirm-run-unsafe-code)
$python -m eval run "${models[@]}" "${common[@]}" --tasks attnres_humaneval --batch-size 82 --output results/humaneval
$python -m eval run "${models[@]}" "${common[@]}" --tasks attnres_perplexity --batch-size 4 --output results/perplexity
