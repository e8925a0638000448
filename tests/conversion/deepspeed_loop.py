"""A trainer with DeepSpeed's ZeRO and a Llama of `transformers`; tests/conversion/test_deepspeed.py starts it.

It needs torch, deepspeed and transformers, and nothing of this package. `job.json` in the folder that is its argument:
stage, config (of the model), start (the folder of a universal checkpoint, or null), save (step -> folder), rates (of
each step, and one more), and AdamW's settings. `batches.pt`: for each step the inputs and the targets of all ranks.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig


def engine_of(job: dict[str, Any]) -> Any:
    """Return DeepSpeed's engine in float32, with AdamW of PyTorch."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**job["config"])).float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.3 * (parameter.dim() == 1), 0.3)
    parameters = [*model.parameters()]
    groups = [
        {"params": [p for p in parameters if p.dim() == n], "weight_decay": decay}
        for n, decay in ((2, job["weight_decay"]), (1, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=job["rates"][0], betas=tuple(job["betas"]), eps=job["eps"])
    settings = {
        "train_micro_batch_size_per_gpu": job["samples"] // dist.get_world_size(),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": job["clip_norm"],
        "zero_optimization": {"stage": job["stage"], "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": job["start"] is not None},
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def take_step(engine: Any, inputs: Tensor, targets: Tensor) -> float:
    """Train on this rank's part of a batch and return the loss of the whole batch, before the step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    share = slice(rank * len(inputs) // ranks, (rank + 1) * len(inputs) // ranks)
    logits = engine(input_ids=inputs[share], use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets[share].flatten(), reduction="sum") / (targets != -100).sum()
    engine.backward(loss * ranks)
    engine.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item()


def set_groups(engine: Any, rate: float, decays: list[float]) -> None:
    """Set the settings of the next update. ZeRO-3 loads the weight decay of the first group for all."""
    for group, decay in zip(engine.optimizer.param_groups, decays, strict=True):
        group["lr"], group["weight_decay"] = rate, decay


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    deepspeed.init_distributed("gloo")
    engine = engine_of(job)
    if job["start"]:
        loaded, _ = engine.load_checkpoint(job["start"])
        assert loaded is not None, f"DeepSpeed has loaded nothing from {job['start']}"
        for (
            state
        ) in engine.optimizer.optimizer.state.values():  # ZeRO-3 gives all groups one counter, which each raises
            state["step"] = state["step"].clone()
    losses = {}
    for step, batch in enumerate(torch.load(folder / "batches.pt"), start=1):
        if step <= engine.global_steps:
            continue
        set_groups(engine, job["rates"][step - 1], [job["weight_decay"], 0.0])
        losses[step] = take_step(engine, *batch)
        set_groups(engine, job["rates"][step], [job["weight_decay"], 0.0])
        if str(step) in job["save"]:
            engine.save_checkpoint(job["save"][str(step)])
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
    dist.barrier()
    os._exit(0)  # DeepSpeed leaves threads behind


if __name__ == "__main__":
    main(Path(sys.argv[1]))
