"""shardwright sample: generate text with a trained model."""

from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.common import AsJson, print_json, verb


@verb
def sample(
    run_dir: Annotated[Path, typer.Argument(help="the folder of a run (`out` of its run file)")],
    prompt: Annotated[str, typer.Option(help="the prompt that the text continues")] = "def ",
    tokens: Annotated[int, typer.Option(min=1, help="tokens to generate")] = 80,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the most probable token; higher: more random")] = 0.8,
    top_k: Annotated[int, typer.Option(min=1, help="sample from this many most probable tokens")] = 40,
    seed: Annotated[int, typer.Option(help="seed of the sampling")] = 0,
    json: AsJson = False,
) -> None:
    """Generate text with the newest checkpoint of a run, on one process.

    shardwright sample quickstart/run --prompt "import os"
    """
    from shardwright.training.sample import open_sampler

    text = open_sampler(run_dir).complete(prompt, tokens, temperature=temperature, top_k=top_k, seed=seed)
    if json:
        print_json({"prompt": prompt, "text": text})
    else:
        typer.echo(text)
