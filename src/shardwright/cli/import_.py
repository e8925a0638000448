"""shardwright import: weights of Hugging Face transformers in the format of Shardwright's checkpoints."""

from json import dumps
from pathlib import Path

from shardwright.cli.common import AsJson, argument, option, print_answer, reading_verb
from shardwright.system.units import format_bytes, format_count


@reading_verb
def import_(
    source: str = argument(..., "a folder of transformers, or an id of the hub (OWNER/NAME)", "HF_DIR_OR_ID"),
    out: Path = option(..., "the new folder that is written", "FOLDER"),
    base: Path | None = option(
        None, "HF_DIR has an adapter of peft alone; take it as adapters of these weights, for [lora]", "FOLDER"
    ),
    json: AsJson = False,
) -> None:
    """Write the weights of a Hugging Face model as a folder that runs start with.

    The folder has the weights with a checksum of each shard, the section [model] of a run file (model.toml), and the
    tokenizer. A folder of transformers can also be given to model.from and init.weights as it is.

    shardwright import smollm2/ --out weights/smollm2
    """
    if base is not None:
        _adapter(source, base, out, json)
        return
    from shardwright.training.importing import bytes_of, import_weights
    from shardwright.training.weights import by_reason

    weights = import_weights(source, out)
    architecture, n_bytes = weights.folder.architecture.class_name, bytes_of(weights)
    n = weights.spec.n_parameters
    data = {"out": str(out), "architecture": architecture, "parameters": n, "tensors": len(weights.shapes)}
    lines = [f"{architecture}, {format_count(n)} parameters, {format_bytes(n_bytes)} -> {out}"]
    if weights.folder.untied:
        lines.append(
            "the head is not tied: config.json ties it to the embedding, and the files have a head with other values, "
            "which transformers keeps too"
        )
    lines += [f"left out: {line}" for line in by_reason(weights.left_out)]
    if weights.folder.tokenizer is None:
        lines.append("no tokenizer.json in it: data has to be prepared with a tokenizer of the same vocabulary")
    lines.append(f"  shardwright train RUN.toml --set model.from={out} --set init.weights={out}")
    print_answer(json, data | {"bytes": n_bytes, "left_out": weights.left_out}, *lines)


def _adapter(source: str, base: Path, out: Path, json: bool) -> None:
    from shardwright.training.adapters import import_adapter
    from shardwright.training.weights import by_reason

    given = import_adapter(source, base, out)
    lora, n = given.spec.lora, given.spec.n_trained_parameters
    assert lora is not None
    targets = dumps([*lora.targets])
    keys = f"lora.rank={lora.rank} --set lora.alpha={lora.alpha:g} --set 'lora.targets={targets}'"
    keys += f" --set lora.dropout={lora.dropout:g}" if lora.dropout else ""
    keys += "".join(f" --set lora.{key}=true" for key in ("rslora", "dora") if getattr(lora, key))
    print_answer(
        json,
        {"out": str(out), "base": str(base), "parameters": n, "left_out": given.left_out}
        | {key: getattr(lora, key) for key in ("rank", "alpha", "targets", "dropout", "rslora", "dora")},
        f"adapters of rank {lora.rank}, {format_count(n)} parameters, for {base} -> {out}",
        *(f"left out: {line}" for line in by_reason(given.left_out)),
        f"  shardwright train RUN.toml --set model.from={base} --set init.weights={out} --set {keys}",
    )
