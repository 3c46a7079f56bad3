#!/usr/bin/env bash
# The GPU figures of docs/benchmarks.md, and the GPU tests, one part after the other. Needs the installed package and GPUS
# GPUs of this host; with SHARE_GPUS=1 fewer will do for collectives, core_tcp, algorithms, sweep, sweep_delay,
# convergence, memory and tests: GPUS is the number of ranks then, which share them. Every part ends by itself, most within four minutes.
#
#   tools/measure/gpu_evidence.sh OUT [GPUS] [PART...]     default: 2 GPUs; all_reduce ddp collectives tests
#
# Bagua-Net compared with NCCL's own transport:
#   all_reduce        and NCCL's default and one hand-tuned setting, 8 B to 256 MiB
#   collectives       all others, likewise
#   ddp               VGG16
#   best_COLLECTIVE   compared with the best of nine settings of NCCL at each size, 8 B to 1 GiB: best_all_reduce,
#                     best_all_gather, best_reduce_scatter, best_broadcast, best_all_to_all, best_send_recv
#   best_ddp          VGG16 compared with the best of nine settings, within eight minutes
#   best              all of best_*
# Training:
#   core              gradient all-reduce compared with torch's DDP, NVLink, with traces
#   core_tcp          the same over TCP with Bagua-Net, VGG16 and GPT-2
#   algorithms        every algorithm over TCP with Bagua-Net, as fast as it goes
#   sweep             every algorithm on networks of 10, 25 and 100 Gb/s; needs root and pyroute2
#   sweep_delay       ... of 10 and 25 Gb/s with delays of 1, 5 and 20 ms
#   convergence       does every algorithm train as well? All tasks and seeds, ten minutes with 2 GPUs
#   memory            extra bytes per parameter of every algorithm
#   kernels           the compression compared with a copy, on one GPU
# Correctness:
#   tests             tests/gpu
#   kernel_tests      the compression's kernels, bitwise identical to the CPU's
#
# OUT gets a JSON and a picture per part, and logs and traces in logs-GPUS-PARTS.tar.gz. Exit status: 1 if any part
# failed. SECONDS_BEST (default 110) is what a best_COLLECTIVE may measure, to which it adds the start of all its
# backends. The words of AB_OPTIONS, DDP_OPTIONS, CORE_OPTIONS (core*, algorithms), SWEEP_OPTIONS,
# CONVERGENCE_OPTIONS, KERNEL_OPTIONS and TEST_OPTIONS are added to the commands (smaller sizes, fewer rounds, -k training
# for pytest, ...).
set -uo pipefail

collectives=(all_reduce all_gather reduce_scatter broadcast all_to_all send_recv)

if [ $# -lt 1 ]; then
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
  exit 2
fi
gpus=${2:-2}
if ! [[ $gpus =~ ^[1-9][0-9]*$ ]]; then
  echo "GPUS is '$gpus', which is no number of GPUs; write: $0 $1 2 [PART...]" >&2
  exit 2
fi
out=$(mkdir -p "$1" && cd "$1" && pwd) || exit 2
shift $(($# < 2 ? $# : 2))
[ $# -gt 0 ] || set -- all_reduce ddp collectives tests
known=(all_reduce collectives ddp "${collectives[@]/#/best_}" best_ddp core core_tcp algorithms sweep
  sweep_delay convergence memory kernels tests kernel_tests)
parts=()
for chosen in "$@"; do
  if [ "$chosen" = best ]; then
    parts+=("${collectives[@]/#/best_}" best_ddp)
  elif [[ " ${known[*]} " == *" $chosen "* ]]; then
    parts+=("$chosen")
  else
    echo "unknown part $chosen; there are best ${known[*]}" >&2
    exit 2
  fi
done
repository=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Whoever ends this script ends the part that runs, which would spoil the figures of what comes next: all of the group
# that timeout makes, since timeout itself forgets its child if it is ended while it starts it.
trap 'running=$(jobs -p); [ -z "$running" ] || kill -- "-$running" 2>/dev/null || kill "$running"; exit 143' TERM INT HUP
# From a folder without the package's source, so that the installed package is measured.
cd "$work" || exit 2
# A program that uses NVLink multicast can harm other users of a host's GPUs.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
status=0
share=()
[ -z "${SHARE_GPUS:-}" ] || share=(--share-gpus)

# part NAME SECONDS COMMAND...: bounded, its progress kept out of the way, its failure remembered.
part() {
  local name=$1 seconds=$2 began=$SECONDS code
  shift 2
  echo "== $name"
  timeout -k 10 "$seconds" "$@" >"$work/$name.stdout" 2>"$work/$name.stderr" &
  wait $!
  code=$?
  tail -c 8000 "$work/$name.stdout"
  if [ "$code" -ne 0 ]; then
    status=1
    tail -c 1500 "$work/$name.stderr"
  fi
  echo "== $name: exit status $code, $((SECONDS - began)) s"
  local file
  for file in "$work/$name"/*.json "$work/$name"/*.png; do
    [ -e "$file" ] && cp "$file" "$out/$name-$gpus.${file##*.}"
  done
}

# compare NAME SECONDS OPTION...: the real NCCL, backends in turns.
compare() {
  local name=$1 seconds=$2
  shift 2
  # shellcheck disable=SC2086  # the options are words
  part "$name" "$seconds" python3 -m bagua.cli.net_bench --nccl --ranks "$gpus" "${share[@]}" --output-dir "$work/$name" \
    "$@" ${AB_OPTIONS:-}
}

# measure NAME SECONDS TOOL OPTION...: one of tools/measure, its result file and logs kept.
measure() {
  local name=$1 seconds=$2 tool=$3
  shift 3
  PYTHONPATH=$repository/tools${PYTHONPATH:+:$PYTHONPATH} part "$name" "$seconds" python3 -m measure "$tool" \
    --nproc-per-node "$gpus" --json "$work/$name/$tool.json" "$@"
}

# train NAME SECONDS OPTION...: torch's DDP, a process group per backend and round.
train() {
  # shellcheck disable=SC2086
  measure "$1" "$2" networks --model vgg16 --output-dir "$work/$1" "${@:3}" ${DDP_OPTIONS:-}
}

# core NAME SECONDS OPTION...: Bagua's training compared with torch's DDP, turns in one process group.
core() {
  # shellcheck disable=SC2086
  measure "$1" "$2" core "${share[@]}" "${@:3}" ${CORE_OPTIONS:-}
}

# sweep NAME SECONDS OPTION...: all algorithms, each rank on a host of its own, in networks made for it.
sweep() {
  local name=$1 seconds=$2
  shift 2
  # shellcheck disable=SC2086
  PYTHONPATH=$repository/tools${PYTHONPATH:+:$PYTHONPATH} part "$name" "$seconds" python3 -m sweep --device cuda \
    --ranks "$gpus" "${share[@]}" --json "$work/$name/sweep.json" --plot "$work/$name/sweep.png" "$@" ${SWEEP_OPTIONS:-}
}

# tests NAME PATH: pytest on files of the repository.
tests() {
  # shellcheck disable=SC2086
  part "$1" 590 python3 -m pytest -q --tb=short -p no:cacheprovider -p no:benchmark --timeout 290 -m gpu \
    --rootdir "$repository" -c "$repository/pyproject.toml" "$repository/$2" ${TEST_OPTIONS:-}
}

for chosen in "${parts[@]}"; do
  mkdir -p "$work/$chosen"
  case $chosen in
    all_reduce)
      compare all_reduce 220 -b 8 -e 256M -f 2 --repeats 5 --shared-memory --time-limit 150
      ;;
    collectives)
      compare collectives 180 -b 1K -e 256M -f 8 --repeats 3 --time-limit 110 \
        --collectives all_gather,reduce_scatter,all_to_all,send_recv,broadcast
      ;;
    ddp)
      train ddp 200 --dtype bf16 --steps 20 --rounds 2 --timeout 80 --time-limit 150
      ;;
    best_ddp)
      train best_ddp 480 --dtype bf16 --tuned best --steps 10 --rounds 2 --timeout 60 --time-limit 430
      ;;
    best_*)
      # Eleven backends start a process on each GPU, which takes longer than some of them measure.
      compare "$chosen" $((${SECONDS_BEST:-110} + 180)) --collectives "${chosen#best_}" --tuned best --shared-memory \
        --sizes 8,64,512,1K,4K,16K,64K,256K,1M,4M,16M,64M,256M,1G --repeats 3 --time-limit "${SECONDS_BEST:-110}"
      ;;
    core)
      core core 240 --rounds 6 --steps 20 --time-limit 170 --trace "$work/core/traces"
      ;;
    core_tcp)
      core core_tcp 220 --network tcp --model vgg16,gpt2 --rounds 8 --steps 10 --time-limit 150
      ;;
    algorithms)
      core algorithms 240 --network tcp --algorithms algorithms --baseline with-bagua --model vgg16,gpt2 --steps 8 \
        --warmup 4 --rounds 4 --time-limit 170
      ;;
    sweep)
      sweep sweep 520 --rates 10G,25G,100G --delays 0 --rounds 2 --time-limit 400
      ;;
    sweep_delay)
      sweep sweep_delay 580 --rates 10G,25G --delays 1ms,5ms,20ms --rounds 1 --time-limit 460
      ;;
    convergence)
      # shellcheck disable=SC2086
      measure convergence 3600 convergence --device cuda "${share[@]}" --plot "$work/convergence/convergence.png" \
        ${CONVERGENCE_OPTIONS:-}
      ;;
    memory)
      measure memory 120 memory --device cuda "${share[@]}"
      ;;
    kernels)
      # shellcheck disable=SC2086
      PYTHONPATH=$repository/tools${PYTHONPATH:+:$PYTHONPATH} part kernels 240 python3 -m measure compression \
        --elements 1M,16M,256M --blocks 1024,none --rounds 7 --json "$work/kernels/kernels.json" ${KERNEL_OPTIONS:-}
      ;;
    tests)
      tests tests tests/gpu
      ;;
    kernel_tests)
      tests kernel_tests tests/kernels/test_minmax_uint8_gpu.py
      ;;
  esac
done
tar -C "$work" -czf "$out/logs-$gpus-$(IFS=+ && echo "${parts[*]}").tar.gz" .
exit "$status"
