#!/usr/bin/env bash
# All that waits for a GPU, in 12 minutes: kernels, tests, and rows beside mlx-lm on SmolLM2.
#
#     benchmarks/gpu.sh [FOLDER]    results of each step are in FOLDER as soon as it ends
#
# Environment: LIMIT, seconds in all. TESTS, what pytest gets. SHORT=1 runs the same steps in the
# environment of $PYTHON on $MODEL (data/tiny-base), with few kernels: this needs no GPU.
set -uo pipefail
cd "$(dirname "$0")/.."
results=${1:-${OUT:-gpu-results}}
mkdir -p "$results"
results=$(cd "$results" && pwd)
deadline=$((SECONDS + ${LIMIT:-720}))
python=${PYTHON:-python3}
SHORT=${SHORT:-}
# MLX multiplies float32 in TF32 by default, which the tolerances of the tests do not allow.
export MLX_ENABLE_TF32=0 PYTHONUNBUFFERED=1
: >"$results/summary.txt"

# macOS has no timeout(1).
run_for='import os, signal, subprocess, sys
process = subprocess.Popen(sys.argv[2:], start_new_session=True)
try:
    sys.exit(process.wait(float(sys.argv[1])))
except subprocess.TimeoutExpired:
    os.killpg(process.pid, signal.SIGKILL)
    sys.exit(124)'

# step NAME SECONDS COMMAND...: runs the command for that time, and no longer than what is left.
step() {
    local name=$1 seconds=$2 left=$((deadline - SECONDS)) start=$SECONDS code
    shift 2
    if ((left < 1)); then
        echo "$name: no time left" | tee -a "$results/summary.txt"
        return 1
    fi
    echo "== $name: $*"
    "$python" -c "$run_for" "$((seconds < left ? seconds : left))" "$@" 2>&1 | tee "$results/$name.txt"
    code=${PIPESTATUS[0]}
    echo "$name: exit code $code after $((SECONDS - start)) s" | tee -a "$results/summary.txt"
    return "$code"
}

install() {
    local extras=test,bench cuda
    cuda=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \([0-9]*\).*/\1/p')
    if [[ $cuda ]]; then
        cuda=cuda$((cuda < 13 ? 12 : 13))
        extras+=,$cuda
    fi
    "$python" -m venv "$environment" && python=$environment/bin/python
    step install 200 "$python" -m pip install --quiet -e ".[$extras]" || return
    # MLX's wheels for the CPU and for CUDA share a file name.
    [[ ! $cuda ]] || step install-cuda 120 "$python" -m pip install --quiet --force-reinstall --no-deps "mlx-$cuda"
}

if [[ ! $SHORT ]]; then
    environment=$(mktemp -d)
    trap 'rm -rf "$environment"' EXIT
    install || exit 1
fi
step doctor 60 "$python" -c "from lmx.cli import main; main.main(['doctor'])"
step kernels 180 "$python" benchmarks/compile_kernels.py ${SHORT:+--short}

workers=${SHORT:+0}
read -ra tests <<<"${TESTS:-tests/quantization tests/training tests/generation}"
: >"$results/tests.txt"
step tests 240 "$python" -m pytest -n "${workers:-4}" -v --tb=line -p no:cacheprovider "${tests[@]}"
# Named as they fail: the time may end before the report of pytest.
grep -oE "(FAILED|ERROR) [^ ]+::.*" "$results/tests.txt" | sed 's/ - .*//' | sort -u >"$results/failures.txt"
echo "tests: $(grep -c PASSED "$results/tests.txt") passed, $(wc -l <"$results/failures.txt") failures by name in failures.txt" |
    tee -a "$results/summary.txt"

# Questions and answers for the training, whose program reads the columns of GSM8K.
"$python" - "$results/questions" <<'END'
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
folder.mkdir(exist_ok=True)
for name in ("train", "test"):
    rows = map(json.loads, pathlib.Path(f"data/skills/{name}.jsonl").read_text().splitlines())
    pairs = ([turn["content"] for turn in row["messages"]] for row in rows)
    rows = (json.dumps({"question": q, "answer": f"#### {a}"}) for q, a in pairs)
    (folder / f"{name}.jsonl").write_text("\n".join(rows))
END
if [[ $SHORT ]]; then
    model=${MODEL:-data/tiny-base}
    ptq=(--model "$model" --num-tokens 512 --num-eval-tokens 128 --seq-length 64 --threads 1)
    train=(--num-examples 8 --batch-size 4 --seq-length 64 --num-answers 4 --num-questions 2 --max-tokens 4 --threads 1)
    decode=(--prompt-length 8 --max-tokens 4 --batch-size 2 --repeats 1 --threads 1)
else
    model=$results/runs/reference
    ptq=(--num-tokens 16384 --num-eval-tokens 8192)
    train=(--num-examples 64 --num-answers 32 --num-questions 32 --max-tokens 16)
    decode=(--prompt-length 512 --max-tokens 64 --batch-size 16 --repeats 1)
fi
step gptq 600 "$python" benchmarks/quantization/real_model.py --folder "$results/runs" --part quality --bits 4 \
    --calibration-data builtin:stdlib --eval-data data/skills/valid.jsonl "${ptq[@]}" --rows "mlx gptq" "lmx fast"
training() {
    step "$1" 600 "$python" benchmarks/training/real_model_training.py --folder "$results/train" --model "$model" \
        --gsm8k "$results/questions" --bits 4 "${train[@]}" --rows "${@:2}"
}
training lora "mlx-lm LoRA, fuse" "lmx LoRA"
training qat "mlx-lm LoRA, fuse" "mlx-lm LoRA, fuse, quantize, 4 bits" "lmx QAT-LoRA, 4 bits"
step decode 600 "$python" benchmarks/generation/generate.py --model "$model" --bits 4 "${decode[@]}"
# Weights take more space than they are worth here.
find "$results" \( -name "*.safetensors" -o -name "*.npz" -o -name "*.npy" \) -delete
