#!/usr/bin/env bash
# Four ways to fine-tune the Block 8 port of SmolLM2-135M, three seeds each, two runs at a time with one thread each.
# Usage: training/reports/smollm2/run.sh WORK_FOLDER    then: python -m training.reports.smollm2.report WORK_FOLDER
set -euo pipefail
cd "$(dirname "$0")/../../.."
export work=$(realpath -m "$1") python=.venv/bin/python steps=${STEPS:-40}
export HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore OMP_NUM_THREADS=1

mkdir -p "$work"
if [ ! -d "$work/ported" ]; then
    $python -m conversion port demo/checkpoints/SmolLM2-135M-Instruct "$work/ported" --num-blocks 8
fi
# real text: modules of the Python standard library with much documentation in them
$python -c "
import sysconfig, pathlib
library = pathlib.Path(sysconfig.get_paths()['stdlib'])
names = ['argparse.py', 'collections/__init__.py', 'dataclasses.py', 'typing.py', 'statistics.py', 'random.py', 'enum.py']
pathlib.Path('$work/library.txt').write_text('\n'.join((library / name).read_text() for name in names)[:400_000])
"

run() {
    variant=$1 seed=$2
    output=$work/$variant-$seed
    [ -e "$output/result.json" ] && return
    case $variant in
        lora) flags=(--no-depth) ;;
        depth) flags=(--lora none) ;;
        lora-and-depth) flags=() ;;
        lora-standard-residuals) flags=(--control) ;;
    esac
    $python -m training finetune --model "$work/ported" --data "$work/library.txt" --output "$output" "${flags[@]}" \
        --length 256 --held-out 0.02 --max-steps "$steps" --per-device-train-batch-size 2 --learning-rate 2e-4 \
        --warmup-steps 2 --logging-steps 5 --save-strategy no --seed "$seed" --disable-tqdm True >"$output.log" 2>&1
    echo "$variant, seed $seed: $(tail -1 "$output.log")"
}
export -f run
for seed in 1 2 3; do
    for variant in lora lora-standard-residuals depth lora-and-depth; do
        echo "$variant $seed"
    done
done | xargs -P 2 -L 1 bash -c 'run "$0" "$1"'
