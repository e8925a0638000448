#!/bin/bash
# Llama 3 8B with Megatron-LM on 2 nodes of 8 GPUs; for `shardwright plan --from`.
GPUS_PER_NODE=8
NNODES=2
LAUNCH_ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank ${NODE_RANK:-0})
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000
    --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights --hidden-dropout 0.0 --attention-dropout 0.0
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B
)
TRAIN_ARGS=(
    --bf16 --micro-batch-size 1 --global-batch-size 128 --lr 3e-4 --train-iters 1000
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
LAYOUT_ARGS=(--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel)
torchrun ${LAUNCH_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} ${TRAIN_ARGS[@]} ${LAYOUT_ARGS[@]} --data-path $1
