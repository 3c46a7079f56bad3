#!/usr/bin/env bash
# The GPU figures of docs/benchmarks.md in one run: the NCCL comparison, the DDP training, the other collectives and the
# GPU tests. Needs the installed package and GPUS GPUs of this host. Every part ends by itself, in two to four minutes.
#
#   tools/train/gpu_evidence.sh OUT [GPUS] [PART...]     parts: all_reduce ddp collectives tests (default: all)
#
# OUT gets one JSON per part, the pictures, and logs.tar.gz with NCCL's logs. Exit status: 1 if any part failed.
# AB_OPTIONS and DDP_OPTIONS are added to the commands (smaller sizes, another --tuned, ...).
set -uo pipefail

if [ $# -lt 1 ]; then
  sed -n '2,8p' "$0" | cut -c3-
  exit 2
fi
out=$(mkdir -p "$1" && cd "$1" && pwd) || exit 2
gpus=${2:-2}
shift $(($# < 2 ? $# : 2))
parts=${*:-all_reduce ddp collectives tests}
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
  tail -c 5000 "$work/$name.stdout"
  if [ "$code" -ne 0 ]; then
    status=1
    tail -c 1500 "$work/$name.stderr"
  fi
  echo "== $name: exit status $code, $((SECONDS - began)) s"
}

keep() {
  local file
  for file in "$work/$1"/*.json "$work/$1"/*.png; do
    [ -e "$file" ] && cp "$file" "$out/$1-$gpus.${file##*.}"
  done
}

for chosen in $parts; do
  case $chosen in
    all_reduce)
      # shellcheck disable=SC2086  # the options are words
      part all_reduce 220 python3 -m bagua.cli.net_bench --nccl --ranks "$gpus" -b 8 -e 256M -f 2 --repeats 5 --shared-memory \
        --time-limit 150 --output-dir "$work/all_reduce" ${AB_OPTIONS:-}
      keep all_reduce
      ;;
    collectives)
      # shellcheck disable=SC2086
      part collectives 180 python3 -m bagua.cli.net_bench --nccl --ranks "$gpus" -b 1K -e 256M -f 8 --repeats 3 \
        --collectives all_gather,reduce_scatter,all_to_all,send_recv,broadcast \
        --time-limit 110 --output-dir "$work/collectives" ${AB_OPTIONS:-}
      keep collectives
      ;;
    ddp)
      # shellcheck disable=SC2086
      part ddp 200 python3 "$repository/tools/train/compare_ddp.py" --nproc-per-node "$gpus" --model vgg16 --dtype bf16 \
        --steps 25 --rounds 2 --run-timeout 80 --time-limit 150 --output-dir "$work/ddp" ${DDP_OPTIONS:-}
      keep ddp
      ;;
    tests)
      part tests 280 python3 -m pytest -q --tb=short -p no:cacheprovider --timeout 120 -m gpu --rootdir "$repository" \
        -c "$repository/pyproject.toml" "$repository/tests/gpu"
      ;;
    *)
      echo "unknown part $chosen; there are all_reduce, collectives, ddp and tests" >&2
      exit 2
      ;;
  esac
done
tar -C "$work" -czf "$out/logs-$gpus.tar.gz" .
exit "$status"
