#!/usr/bin/env bash
# The GPU figures of docs/benchmarks.md: NCCL comparisons, DDP trainings and the GPU tests, one part after the other.
# Needs the installed package and GPUS GPUs of this host. Every part ends by itself, most within four minutes.
#
#   tools/train/gpu_evidence.sh OUT [GPUS] [PART...]     default: 2 GPUs; all_reduce ddp collectives tests
#
#   all_reduce        beside NCCL's default and one hand-tuned setting, 8 B to 256 MiB
#   collectives       all others, likewise
#   ddp               VGG16
#   tests             tests/gpu
#   best_COLLECTIVE   beside the best of nine settings of NCCL at each size, 8 B to 1 GiB: best_all_reduce,
#                     best_all_gather, best_reduce_scatter, best_broadcast, best_all_to_all, best_send_recv
#   best_ddp          VGG16 beside the best of nine settings, within eight minutes
#   best              all of best_*
#
# OUT gets a JSON and a picture per part, and NCCL's logs in logs-GPUS-PARTS.tar.gz. Exit status: 1 if any part failed.
# SECONDS_BEST (default 110) is what a best_COLLECTIVE may measure, to which it adds the start of all its contenders.
# AB_OPTIONS and DDP_OPTIONS are added to the commands (smaller sizes, another --tuned, ...).
set -uo pipefail

collectives=(all_reduce all_gather reduce_scatter broadcast all_to_all send_recv)

if [ $# -lt 1 ]; then
  sed -n '2,18p' "$0" | cut -c3-
  exit 2
fi
out=$(mkdir -p "$1" && cd "$1" && pwd) || exit 2
gpus=${2:-2}
shift $(($# < 2 ? $# : 2))
[ $# -gt 0 ] || set -- all_reduce ddp collectives tests
parts=()
for chosen in "$@"; do
  case $chosen in
    best) parts+=("${collectives[@]/#/best_}" best_ddp) ;;
    all_reduce | collectives | ddp | tests | best_ddp) parts+=("$chosen") ;;
    *)
      if [[ " ${collectives[*]/#/best_} " != *" $chosen "* ]]; then
        echo "unknown part $chosen; there are all_reduce collectives ddp tests best best_ddp ${collectives[*]/#/best_}" >&2
        exit 2
      fi
      parts+=("$chosen")
      ;;
  esac
done
repository=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# From a folder without the package's source, so that the installed package is measured.
cd "$work" || exit 2
# A program that uses NVLink multicast can harm other users of a host's GPUs.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
status=0

# part NAME SECONDS COMMAND...: bounded, its progress kept out of the way, its failure remembered.
part() {
  local name=$1 seconds=$2 began=$SECONDS code
  shift 2
  echo "== $name"
  timeout -k 10 "$seconds" "$@" >"$work/$name.stdout" 2>"$work/$name.stderr"
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

# compare NAME SECONDS OPTION...: the real NCCL, contenders in turns.
compare() {
  local name=$1 seconds=$2
  shift 2
  # shellcheck disable=SC2086  # the options are words
  part "$name" "$seconds" python3 -m bagua.cli.net_bench --nccl --ranks "$gpus" --output-dir "$work/$name" "$@" \
    ${AB_OPTIONS:-}
}

# train NAME SECONDS OPTION...: torch's DDP, a process group per contender and round.
train() {
  local name=$1 seconds=$2
  shift 2
  # shellcheck disable=SC2086
  part "$name" "$seconds" python3 "$repository/tools/train/compare_ddp.py" --nproc-per-node "$gpus" --model vgg16 \
    --dtype bf16 --output-dir "$work/$name" "$@" ${DDP_OPTIONS:-}
}

for chosen in "${parts[@]}"; do
  case $chosen in
    all_reduce)
      compare all_reduce 220 -b 8 -e 256M -f 2 --repeats 5 --shared-memory --time-limit 150
      ;;
    collectives)
      compare collectives 180 -b 1K -e 256M -f 8 --repeats 3 --time-limit 110 \
        --collectives all_gather,reduce_scatter,all_to_all,send_recv,broadcast
      ;;
    ddp)
      train ddp 200 --steps 25 --rounds 2 --run-timeout 80 --time-limit 150
      ;;
    best_ddp)
      train best_ddp 480 --tuned best --steps 15 --rounds 2 --run-timeout 60 --time-limit 430
      ;;
    best_*)
      # Eleven contenders start a process on each GPU, which takes longer than some of them measure.
      compare "$chosen" $((${SECONDS_BEST:-110} + 180)) --collectives "${chosen#best_}" --tuned best --shared-memory \
        --sizes 8,64,512,1K,4K,16K,64K,256K,1M,4M,16M,64M,256M,1G --repeats 3 --time-limit "${SECONDS_BEST:-110}"
      ;;
    tests)
      part tests 590 python3 -m pytest -q --tb=short -p no:cacheprovider --timeout 290 -m gpu --rootdir "$repository" \
        -c "$repository/pyproject.toml" "$repository/tests/gpu"
      ;;
  esac
done
tar -C "$work" -czf "$out/logs-$gpus-$(IFS=+ && echo "${parts[*]}").tar.gz" .
exit "$status"
