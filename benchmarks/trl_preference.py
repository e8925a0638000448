"""Writes the numbers of TRL that tests/training/test_preference_trl.py compares with: losses and gradients of DPO, IPO
and SimPO of TRL's trainers, in fp32, for a tiny model, a reference and pairs of answers.

    python3 -m venv trl && trl/bin/pip install torch==2.13.0 trl==1.16.0
    trl/bin/python benchmarks/trl_preference.py tests/training/trl

OUT gets folders of transformers: `policy` and `reference`, and for each loss one with gradients in place of weights;
`batch.json` has the token ids of the pairs, and the losses.
"""

import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer

BETA, GAMMA = 0.3, 0.5
RECORDS = [
    {"prompt": "a b c", "chosen": " d e f g", "rejected": " h i"},
    {"prompt": "k l", "chosen": " m", "rejected": " n o p q r s"},
    {"prompt": "t u v w x", "chosen": " y z a", "rejected": " b c d"},
]
LOSSES = {"dpo": "sigmoid", "ipo": "ipo"}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each letter."""
    vocabulary = {token: n for n, token in enumerate(["<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def model(seed: int) -> LlamaForCausalLM:
    """Return a tiny model in fp32 with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=29,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=False,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).float()


def common(folder: str) -> dict[str, Any]:
    """Return the options of both trainers."""
    return {
        "output_dir": folder, "report_to": "none", "use_cpu": True, "bf16": False, "beta": BETA,
        "per_device_train_batch_size": len(RECORDS), "gradient_checkpointing": False, "seed": 0,
    }  # fmt: skip


def loss_of(trainer: Any, policy: LlamaForCausalLM) -> tuple[float, dict[str, Any]]:
    """Compute the gradient of a trainer's loss into the policy; return the loss and the batch."""
    batch = next(iter(trainer.get_train_dataloader()))
    policy.train()
    policy.zero_grad()
    loss = trainer.compute_loss(policy, copy.deepcopy(batch))
    loss.backward()
    return float(loss.detach()), batch


def with_gradients(policy: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return a copy whose weights are the gradients of the policy."""
    copied = copy.deepcopy(policy)
    with torch.no_grad():
        for weight, source in zip(copied.parameters(), policy.parameters(), strict=True):
            weight.copy_(source.grad)
    return copied


def _answers(ids_BT: torch.Tensor, counted_BT: torch.Tensor) -> list[dict[str, Any]]:
    """Return each answer with its prompt, without padding, and the number of tokens of the prompt."""
    found = []
    for ids_T, counted_T in zip(ids_BT.tolist(), counted_BT.tolist(), strict=True):
        places = [place for place, counted in enumerate(counted_T) if counted]
        found.append({"ids": ids_T[: places[-1] + 1], "prompt": places[0]})
    return found


def main(out: Path) -> None:
    """Write all files to `out`."""
    policy, reference = model(1), model(2)
    policy.save_pretrained(out / "policy")
    reference.save_pretrained(out / "reference")
    record: dict[str, Any] = {
        "trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__,
        "beta": BETA, "gamma": GAMMA, "losses": {},
    }  # fmt: skip
    words, data = tokenizer(), Dataset.from_list(RECORDS)
    with tempfile.TemporaryDirectory() as folder:
        for kind, loss_type in LOSSES.items():
            trainer = DPOTrainer(
                model=policy, ref_model=reference, args=DPOConfig(**common(folder), loss_type=[loss_type]),
                train_dataset=data, processing_class=words,
            )  # fmt: skip
            record["losses"][kind], batch = loss_of(trainer, policy)
            with_gradients(policy).save_pretrained(out / kind)
        answers = _answers(batch["input_ids"], batch["completion_mask"])
        options = CPOConfig(**common(folder), loss_type="simpo", simpo_gamma=GAMMA, cpo_alpha=0.0)
        trainer = CPOTrainer(model=policy, args=options, train_dataset=data, processing_class=words)
        record["losses"]["simpo"], batch = loss_of(trainer, policy)
        with_gradients(policy).save_pretrained(out / "simpo")
        ids = torch.cat([batch["chosen_input_ids"], batch["rejected_input_ids"]])
        labels = torch.cat([batch["chosen_labels"], batch["rejected_labels"]])
        assert answers == _answers(ids, labels != -100), "the two trainers read the same answers"
    record["pairs"] = list(zip(answers[: len(RECORDS)], answers[len(RECORDS) :], strict=True))
    for folder in out.glob("*/generation_config.json"):
        folder.unlink()
    (out / "batch.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["losses"]))


main(Path(sys.argv[1]))
