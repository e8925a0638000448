"""Shell scripts in the style of Megatron-LM's examples, with published values."""

GPT_175B = """\
#!/bin/bash
# Values: GPT-3 175B of examples/gpt3 of Megatron-LM (arXiv 2104.04473, table 1, on 1,024 A100).
GPUS_PER_NODE=8
NUM_NODES=128
LAUNCH=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr ${MASTER_ADDR:-localhost}
)
MODEL=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto  # a comment
)
TRAIN=" \\
    --micro-batch-size 1 \\
    --global-batch-size 1536 \\
    --fp16 --lr 6.0e-5 --clip-grad 1.0"
torchrun ${LAUNCH[@]} pretrain_gpt.py ${MODEL[@]} $TRAIN \\
    --tensor-model-parallel-size 8 \\
    --pipeline-model-parallel-size 16 \\
    --vocab-file $1 --save "$(date +%s)/checkpoints"
"""
MIXTRAL = """\
# Values: Mixtral 8x7B of examples/mixtral of Megatron-LM.
NNODES=8
if [ -n "${WANDB_API_KEY}" ]; then
    LOG+=(--wandb-project x)
fi
ARGS=(--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32)
ARGS+=(--group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear)
ARGS+=(--position-embedding-type rope --rotary-base 1000000 --untie-embeddings-and-output-weights)
ARGS+=(--hidden-dropout 0.0 --attention-dropout 0.0 --seq-length 4096 --max-position-embeddings 32768)
ARGS+=(--num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --tokenizer-type Llama2Tokenizer)
EP=8
case $EP in
    1) PP=1 ;;
    *) PP=$((32 / EP)) ;;
esac
torchrun --nproc_per_node 8 --nnodes $NNODES pretrain_gpt.py "${ARGS[@]}" ${LOG[@]} --bf16 \\
    --micro-batch-size 1 --global-batch-size 256 --expert-model-parallel-size $EP \\
    --pipeline-model-parallel-size $PP --use-distributed-optimizer --overlap-grad-reduce
"""
LLAMA_8B = """\
# Values: Llama 3 8B of examples/llama of Megatron-LM, in bf16 and with tensor parallelism.
MODEL_SIZE=8B
if [[ "$MODEL_SIZE" == "70B" ]]; then
    LAYERS=80
elif [ $MODEL_SIZE = 8B ] && [ 1 -eq 1 ]; then
    LAYERS=32
fi
options="--num-layers $LAYERS --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \\
  --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 \\
  --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 500000 --swiglu \\
  --normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear --vocab-size 128256 \\
  --hidden-dropout 0 --attention-dropout 0"
run_cmd="torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py $options --bf16 --micro-batch-size 1 \\
  --global-batch-size 128 --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer \\
  --recompute-granularity full --recompute-method block --recompute-num-layers 4 | tee log"
eval ${run_cmd}
"""
DEEPSEEK_V3 = """\
--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
--v-head-dim 128 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --vocab-size 129280
--num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
--moe-layer-freq ([0]*3+[1]*58) --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5
--moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-load-balancing-type none
--moe-router-enable-expert-bias
--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 8192 --bf16
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 16 --expert-model-parallel-size 64
--num-layers-in-first-pipeline-stage 3 --num-layers-in-last-pipeline-stage 2
--use-distributed-optimizer --overlap-grad-reduce --moe-token-dispatcher-type flex
"""
