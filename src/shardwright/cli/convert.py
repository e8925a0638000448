"""shardwright convert: a training checkpoint in the format of another system."""

from pathlib import Path

from shardwright.cli.common import AsJson, argument, flag, option, print_answer, reading_verb
from shardwright.system.units import counted, format_count


@reading_verb
def convert(
    source: Path = argument(..., "the folder of a checkpoint, of any of the formats", "SRC"),
    out: Path = argument(..., "the new folder that is written", "DST"),
    to: str = option(..., "shardwright, megatron, torchtitan, dcp, deepspeed-universal or hf", "FORMAT"),
    model: str | None = option(None, "the model, if SRC has no config.json: a preset, or a folder with one"),
    run: Path | None = option(None, "with --to shardwright: the run that continues", "RUN.toml"),
    prove: bool = flag("compute logits, gradients and the next update with both, and compare them"),
    json: AsJson = False,
) -> None:
    """Write a training checkpoint, weights and AdamW's states, in the format of another system.

    The formats are checkpoints of Shardwright, Megatron's torch_dist, PyTorch's distributed checkpoints (DCP) with the
    names of torchtitan or of transformers, universal checkpoints of DeepSpeed (and of its ZeRO-1, 2 and 3, as SRC), and
    folders of transformers. Any number of ranks may have written SRC, and any layout loads DST.
    Nothing in SRC is executed.

    shardwright convert outputs/checkpoint/step-1000 runs/moved --to shardwright --model llama-3.1-8b --run run.toml
    """
    from shardwright.conversion.formats import convert as write

    result = write(source, out, to, model=model, run=run, prove=prove)
    state = result.state
    n, remarks = state.spec.n_parameters, list(result.remarks)
    data = {"from": state.format, "to": to, "out": str(out), "parameters": n, "step": state.step, "remarks": remarks}
    optimizer = "" if state.step is None else f", AdamW after {counted(state.step, 'step')}"
    lines = [f"{state.format}: {format_count(n)} parameters{optimizer} -> {to}: {out}", *remarks]
    if to == "shardwright" and run is not None:
        lines.append(f"  shardwright train {run} --set checkpoint.resume={out}")
    print_answer(json, data, *lines)
