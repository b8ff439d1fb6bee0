#!/usr/bin/env bash
# Qwen3-235B-A22B on 256 H100 with Megatron-LM: a launch to judge with `treadle plan --from`.
TP=4
ARGS=(
    --num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64 --kv-channels 128
    --group-query-attention --num-query-groups 4 --qk-layernorm --swiglu --normalization RMSNorm
    --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope --vocab-size 151936
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 1536 --moe-grouped-gemm --moe-permute-fusion
    --tensor-model-parallel-size $TP --sequence-parallel --pipeline-model-parallel-size 8
    --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
    --micro-batch-size 1 --global-batch-size 1024 --seq-length 4096 --bf16 --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather --tp-comm-overlap
)
torchrun --nnodes 32 --nproc-per-node 8 pretrain_gpt.py "${ARGS[@]}" --data-path $DATA --log-interval 10
