#!/usr/bin/env bash
# All that a GPU should tell posx, in the order of what it tells: `posx doctor`, a step of training beside its rivals,
# attention with every encoding, a sweep, the numerical tests; then what an hour adds.
#
#   scripts/setup.sh dev peers cuda12                         # and the CUDA build of torch
#   benchmarks/accelerator.sh runs/gpu --minutes=10           # the same command resumes
#   benchmarks/accelerator.sh runs/gpu                        # an hour
#   WHEELS=wheels benchmarks/accelerator.sh runs/gpu          # what the machine lacks, from a folder of wheels
#   TINY=1 benchmarks/accelerator.sh runs/tiny                # the same stages on this CPU at tiny sizes, in minutes
#
# Each stage has a part of the minutes. Benchmarks write every measure as it is made, and a stage that is cut keeps what
# it had. A stage that fails or runs out of time is reported, later stages go on, and the next call tries it again.
# However the script ends, FOLDER/results.jsonl has a line for each stage, with its report, and FOLDER/summary.md the
# tables. PLATFORM=tpu chooses another platform than cuda, PYTHON another interpreter, STAGES="ceiling train" some stages
# alone. TEXT=FOLDER is the text of the study, by default the source code of Python's library.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?benchmarks/accelerator.sh FOLDER: give the folder of the results}
minutes=60
case "${2:-}" in
  "") ;;
  --minutes=*) minutes=${2#--minutes=} ;;
  *) echo "$2 is unknown. The only flag is --minutes=N" >&2; exit 2 ;;
esac
[[ "$minutes" =~ ^[1-9][0-9]*$ ]] || { echo "--minutes=$minutes must be a whole number, at least 1" >&2; exit 2; }
python=${PYTHON:-${VENV:-.venv}/bin/python}
mkdir -p "$out"
out=$(cd "$out" && pwd)

if [ -n "${WHEELS:-}" ]; then
  "$python" -m pip install --quiet --no-index --no-deps --upgrade --target "$out/site" "$WHEELS"/*.whl || exit 1
  export PYTHONPATH="$out/site${PYTHONPATH:+:$PYTHONPATH}"
fi

# The runs of a sweep are processes of their own, which start elsewhere.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# Posx and torch share the memory of one device.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
export JAX_PLATFORMS=${PLATFORM:-cuda},cpu
[ -n "${TINY:-}" ] && export JAX_PLATFORMS=cpu
export PYTHONUNBUFFERED=1

summary() {
  trap - EXIT INT TERM
  [ -n "${running:-}" ] && kill "$running" 2>/dev/null && wait "$running"
  "$python" -m benchmarks.stages "$out" || exit 1
}
trap summary EXIT
trap 'exit 143' INT TERM

stage() { # NAME PERCENT COMMAND...
  local name=$1 limit=$((minutes * 60 * $2 / 100)) left=$((minutes * 60 - SECONDS)) start=$SECONDS code=0 status=done
  shift 2
  case " ${STAGES:-$name} " in *" $name "*) ;; *) return ;; esac
  grep -qs "^done" "$out/$name.status" && { echo "$name: done before"; return; }
  limit=$((limit < left ? limit : left))
  [ "$limit" -lt 1 ] && { echo "$name: no time is left"; return; }
  echo "$name: at most $limit s"
  # Stays if this script is killed: benchmarks.stages then tells what there is.
  printf 'cut\n0\n' >"$out/$name.status"
  # In the background, so that a signal to this script is seen while it waits.
  timeout --kill-after=10 "$limit" "$@" >"$out/$name.txt" 2>"$out/$name.log" &
  running=$!
  wait "$running" || code=$?
  running=
  [ "$code" = 124 ] || [ "$code" = 137 ] && status="out of time"
  [ "$code" != 0 ] && [ "$status" = done ] && status="failed with exit code $code"
  printf '%s\n%s\n' "$status" "$((SECONDS - start))" >"$out/$name.status"
  echo "$name: $status after $((SECONDS - start)) s"
}

bench() { # NAME PERCENT ARGUMENTS...
  local name=$1 percent=$2
  shift 2
  stage "$name" "$percent" "$python" -m benchmarks "$@" --out="$out/$name.json"
}

# -vv names a failing test as soon as it fails, so that a run that is cut has said so. One v undoes the -q of pyproject.
tests=(tests/encodings tests/attention tests/lab/test_model.py tests/lab/test_generate.py tests/test_accelerators.py -vv -n 8)
ours=posx,posx-blockwise,posx-wide-tiles,posx-kernel,posx-fused
rivals=jax.nn,jax.nn-cudnn,torch-sdpa,torch-sdpa-compiled,torch-flex
forms=posx,flash,flash_compiled
some=rope,alibi,t5,nope
lengths=(--lengths=1024,4096,16384 --batch=4 --rounds=5)
long=(--lengths=4096 --batch=4 --rounds=3 --heads=12 --turn_seconds=0.05)
shape=(--shape=large --rounds=3 --steps=10)
steps=(--shape=medium --rounds=3 --steps=16)
profile=(--shape=large --dtype=bfloat16 --encodings=rope --steps=4)
decode=(--rounds=3)
quick=(--config quick)
study=(--config novels_gpu "--config.data.source=${TEXT:-stdlib}")
if [ -n "${TINY:-}" ]; then
  tests=(tests/attention/test_masks.py tests/test_accelerators.py -vv -k "masks or padding or anew")
  some=nope,t5
  lengths=(--lengths=64 --check_length=64 --rounds=1 --heads=2 --head_dim=8 --turn_seconds=0.01)
  long=("${lengths[@]}" --encodings=nope,shaw)
  shape=(--shape=tiny --rounds=1 --steps=2)
  steps=("${shape[@]}" --encodings=nope,shaw)
  profile=(--shape=tiny --encodings=rope --steps=2)
  decode=(--prompt=8 --new=8 --layers=1 --width=32 --heads=2 --rounds=1 --samples=2 --encodings=nope,rope)
  study=(--config smoke --config.train.steps=8 --config.train.warmup_steps=2 --config.train.checkpoint_steps=8
    --config.sweep.encodings=rope --config.eval.num_targets=512)
  quick=("${study[@]}")
fi

stage doctor 12 "$python" -m posx.lab.cli doctor
bench train 30 train --dtype=bfloat16 --encodings=$some --contestants=$forms "${shape[@]}"
bench attention_all 25 attention --dtype=bfloat16 --contestants=posx,posx-kernel "${long[@]}"
stage quick 20 "$python" -m posx.lab.cli sweep --workdir "$out/quick" "${quick[@]}"
stage tests 20 "$python" -m pytest -p no:cacheprovider "${tests[@]}"
bench profile 10 profile "${profile[@]}"
bench ceiling 3 ceiling --rounds=3
bench attention 20 attention --dtype=bfloat16 --encodings=$some --contestants=$ours,$rivals "${lengths[@]}"
bench train_all 10 train --dtype=bfloat16 --contestants=posx "${steps[@]}"
# In full float32, so that cached and recomputed logits agree.
stage decode 10 env JAX_DEFAULT_MATMUL_PRECISION=highest \
  "$python" -m benchmarks decode "${decode[@]}" --out="$out/decode.json"
stage study 30 "$python" -m posx.lab.cli sweep --workdir "$out/study" "${study[@]}"
