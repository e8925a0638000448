"""transformers 5.24.0: with tensor parallelism and accumulation the gradients of q_norm and k_norm count early
micro-batches several times.

    python transformers_tp_accumulation.py

needs transformers, and prints on two gloo ranks with tp 2 the gradient of one norm of a Qwen3 after one and after two
micro-batches, and the gradient of the same model in one process. The norms are replicated, and each rank's gradient is
of its own heads. `ReplicatedWithGradAllReduce` sums `param.grad` over ranks after each backward pass. The second time
`param.grad` has the sum of the first micro-batch, on both ranks.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

N_RANKS, NAME = 2, "model.layers.0.self_attn.q_norm.weight"
SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
CONFIG = Qwen3Config(**SIZES, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False)


def norms(model: Qwen3ForCausalLM) -> list[float]:
    """Return the Euclidean norm of the gradient after each of two micro-batches."""
    result = []
    for micro_batch in torch.arange(48).reshape(2, 2, 12) % 31:
        model(input_ids=micro_batch).logits.square().mean().backward()
        result.append(round(dict(model.named_parameters())[NAME].grad.norm().item(), 6))
    return result


def compare(rank: int, folder: str) -> None:
    """Print the norms on rank 0."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(N_RANKS))
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=N_RANKS)
    model = Qwen3ForCausalLM.from_pretrained(folder, tp_plan="auto")
    with_tp = norms(model.train())
    if rank == 0:
        one_process = norms(Qwen3ForCausalLM.from_pretrained(folder).train())
        print(f"after one and two micro-batches: tp {N_RANKS}: {with_tp}; one process: {one_process}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        CONFIG.save_pretrained(folder)
        save_file(Qwen3ForCausalLM(CONFIG).state_dict(), f"{folder}/model.safetensors", {"format": "pt"})
        mp.spawn(compare, (folder,), N_RANKS)
