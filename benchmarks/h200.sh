#!/usr/bin/env bash
# The figures of one large GPU: the first line takes 7 minutes, the second 5. Every script writes down what it has as it goes.
#
#     SAMESTEP_DATA=FOLDER bash benchmarks/h200.sh same gpt2 small large
#     SAMESTEP_DATA=FOLDER bash benchmarks/h200.sh ninety streaming growth workspace
#
# SAMESTEP_DATA is the folder with the four files of Fashion-MNIST. Figures go to $OUT, or to benchmarks/results.
set -u
cd "$(dirname "$0")"
export PYTHONPATH="$PWD/../src:$PWD" PYTHONUNBUFFERED=1
graph="CUDA graph, model compiled"
ours="samestep, 1 shard, compile|samestep, 8 shards, compile"

part() {
    case $1 in
    same) # in the background, while others compile: it measures no time
        python gpu_same.py --budget 70 --parts 4 > "${OUT:-results}/gpu-same.txt" 2>&1 & ;;
    gpt2)
        python speed.py --models gpt2 --file speed-gpt2 --budget 100 --seconds 200 --steps 30 --kernels "$ours" \
            --names "plain loop|torch.compile|$graph|$graph, deterministic|$ours|samestep, 8 shards|samestep, 1 shard" ;;
    small)
        python speed.py --models lenet,jax --file speed-small --budget 80 --seconds 200 --kernels "samestep, 8 shards|$ours" \
            --names "plain loop|torch.compile|$graph|$graph, deterministic|CUDA graph of the step|torch.compile, reduce-overhead|Lightning|Accelerate|an epoch in one scan|samestep, 8 shards|samestep, 1 shard|$ours|samestep, 8 shards, 2 replicas|samestep, 8 shards, 3 replicas|samestep, 8 shards, 8 replicas" ;;
    large)
        last=", channels last"
        python speed.py --models resnet18,gpt --file speed-large --budget 130 --seconds 200 \
            --kernels "$ours|samestep, 1 shard, compile$last|samestep, 8 shards, compile$last" \
            --names "plain loop|$graph|$graph, deterministic|$graph$last|$graph$last, deterministic|$ours|samestep, 1 shard, compile$last|samestep, 8 shards, compile$last|samestep, 1 shard|samestep, 8 shards|samestep, 1 shard$last|samestep, 8 shards$last" ;;
    ninety) python ninety.py --compile --seeds 20 ;;
    streaming) python streaming.py --gib 4 --models small --rounds 5 ;;
    growth) python growth.py --rounds 3 --budget 100 ;;
    workspace) # cuBLAS's smaller one, of which other bits come
        last=", channels last"
        CUBLAS_WORKSPACE_CONFIG=:16:8 python speed.py --models lenet,resnet18,gpt,gpt2 --precision float32,bfloat16 --rounds 3 \
            --file speed-workspace --budget 90 --seconds 150 \
            --names "$ours|samestep, 1 shard|samestep, 8 shards|samestep, 1 shard, compile$last|samestep, 8 shards, compile$last" ;;
    *) echo "h200.sh: no part $1" >&2 && exit 2 ;;
    esac
}

for name in "$@"; do
    echo "=== $SECONDS s: $name"
    part "$name"
done
wait
echo "=== $SECONDS s: end"
