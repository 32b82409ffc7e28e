#!/usr/bin/env bash
# All that an hour on one GPU should do: numerical tests, ceiling, attention, training, decoding and the GPU preset.
#
#   scripts/setup.sh dev peers cuda12            # and the CUDA build of torch: pip install torch==2.13.0
#   benchmarks/accelerator.sh runs/gpu           # the same command resumes
#   TINY=1 benchmarks/accelerator.sh runs/tiny   # the same stages on this CPU at tiny sizes, in minutes
#
# Each stage has a time limit. A stage that fails or runs out of time is reported, later stages go on, and the next call
# tries it again. FOLDER/results.jsonl holds a line for each stage, with its report. FOLDER/summary.md has the tables.
# PLATFORM=tpu chooses another platform than cuda, PYTHON another interpreter, STAGES="ceiling train" some stages alone.
# TEXT=FOLDER is the text of the study, by default the source code of Python's library.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?benchmarks/accelerator.sh FOLDER: give the folder of the results}
python=${PYTHON:-${VENV:-.venv}/bin/python}
mkdir -p "$out"
out=$(cd "$out" && pwd)

# Posx and torch share the memory of one device.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
export JAX_PLATFORMS=${PLATFORM:-cuda},cpu
[ -n "${TINY:-}" ] && export JAX_PLATFORMS=cpu

stage() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2 start=$SECONDS code=0 status=done
  shift 2
  case " ${STAGES:-$name} " in *" $name "*) ;; *) return ;; esac
  grep -qs "^done" "$out/$name.status" && { echo "$name: done before"; return; }
  echo "$name: at most $limit s"
  timeout --kill-after=60 "$limit" "$@" >"$out/$name.txt" 2>"$out/$name.log" || code=$?
  [ "$code" = 124 ] && status="out of time"
  [ "$code" != 0 ] && [ "$code" != 124 ] && status="failed with exit code $code"
  printf '%s\n%s\n' "$status" "$((SECONDS - start))" >"$out/$name.status"
  echo "$name: $status after $((SECONDS - start)) s"
}

bench() { # NAME SECONDS ARGUMENTS...
  local name=$1 limit=$2
  shift 2
  stage "$name" "$limit" "$python" -m benchmarks "$@" --out="$out/$name.json"
}

tests=(tests/encodings tests/attention tests/test_model.py tests/test_generate.py tests/test_accelerators.py -n 4)
ours=posx,posx-blockwise,posx-wide-tiles,posx-fused
rivals=jax.nn,jax.nn-cudnn,torch-sdpa,torch-sdpa-compiled,torch-flex
forms=posx,eager,flash,compiled,flash_compiled
some=nope,rope,alibi,t5
lengths=(--lengths=1024,4096,16384 --batch=4 --rounds=5)
long=(--lengths=4096 --batch=4 --rounds=3)
shape=(--shape=large --rounds=5 --steps=16)
steps=(--shape=medium --rounds=3 --steps=16)
decode=(--rounds=3)
study=(--config novels_gpu "--config.data.source=${TEXT:-stdlib}")
if [ -n "${TINY:-}" ]; then
  tests=(tests/attention/test_masks.py tests/test_accelerators.py -k "masks or padding or anew")
  some=nope,t5
  lengths=(--lengths=64 --check_length=64 --rounds=1 --heads=2 --head_dim=8 --turn_seconds=0.01)
  long=("${lengths[@]}" --encodings=nope,shaw)
  shape=(--shape=tiny --rounds=1 --steps=2)
  steps=("${shape[@]}" --encodings=nope,shaw)
  decode=(--prompt=8 --new=8 --layers=1 --width=32 --heads=2 --rounds=1 --samples=2 --encodings=nope,rope)
  study=(--config smoke --config.train.steps=8 --config.train.warmup_steps=2 --config.train.checkpoint_steps=8
    --config.sweep.encodings=rope --config.eval.num_targets=512)
fi

stage doctor 120 "$python" -m posx.cli doctor
bench ceiling 120 ceiling --rounds=3
stage tests 600 "$python" -m pytest -p no:cacheprovider "${tests[@]}"
bench attention 600 attention --dtype=bfloat16 --encodings=$some --contestants=$ours,$rivals "${lengths[@]}"
bench train 600 train --dtype=bfloat16 --encodings=$some --contestants=$forms "${shape[@]}"
bench attention_all 300 attention --dtype=bfloat16 --contestants=posx,posx-wide-tiles "${long[@]}"
bench train_all 300 train --dtype=bfloat16 --contestants=posx "${steps[@]}"
# In full float32, so that cached and recomputed logits agree.
stage decode 400 env JAX_DEFAULT_MATMUL_PRECISION=highest \
  "$python" -m benchmarks decode "${decode[@]}" --out="$out/decode.json"
stage study 720 "$python" -m posx.cli sweep --workdir "$out/study" "${study[@]}"
"$python" -m benchmarks.stages "$out"
