"""Shardwright models in lm-eval, EleutherAI's lm-evaluation-harness (`pip install 'shardwright[lm-eval]'`).

    python -m shardwright.lm_eval --model shardwright --model_args path=quickstart/run --tasks TASKS

is the command `lm_eval` with one additional model. In Python, importing this module is enough for
`lm_eval.simple_evaluate(model="shardwright", model_args={"path": "quickstart/run"}, tasks=[...])`.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shardwright.cli.common import layout_of
from shardwright.cli.generate import LAYOUT_KEYS
from shardwright.generation.generate import GenerationRequest, generate, layout_problems, without_training
from shardwright.generation.sampling import Sampling
from shardwright.generation.score import ScoreRequest, score
from shardwright.generation.source import open_source
from shardwright.system.console import visible
from shardwright.system.errors import InputError, collecting
from shardwright.system.files import real_path
from shardwright.training.ranks import place_from_environment

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    if __name__ == "__main__":
        sys.exit(f"error: lm-eval cannot be imported ({error}); install it with pip install 'shardwright[lm-eval]'")
    raise

BATCH_SIZE = 16
"""Sequences of a pass, for lm-eval's `--batch_size auto`."""
GENERATION_KEYS = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "seed"}
"""Keys that a task may set for generation."""


@register_model("shardwright")
class ShardwrightLM(TemplateLM):
    """A run (its newest checkpoint), a checkpoint or a transformers folder as an lm-eval model.

    `path`: the folder. `max_length`: tokens that a prediction may depend on, `max_seq_len` of the model by default.
    `max_gen_toks`: number of new tokens if a task does not set it. `layout`: layout keys to run on, such as tp=2; the
    ranks are processes on this machine's CPU. The other arguments are lm-eval's own. Raises InputError
    with all problems at once.
    """

    def __init__(
        self,
        path: str = "",
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        **layout: Any,
    ) -> None:
        super().__init__()
        if not path:
            raise InputError(
                "--model_args has no path; give --model_args path=FOLDER, a run or a folder of transformers"
            )
        if place_from_environment() is not None:
            raise InputError("start lm-eval as one process: the ranks of a layout are started by it, on the CPU")
        problems = []
        source = open_source(Path(path))
        try:
            given = layout_of(",".join(f"{key}={value}" for key, value in layout.items()), LAYOUT_KEYS)
            self.layout = without_training(given, source.spec)
            problems += layout_problems(source.spec, self.layout, None)
        except InputError as error:
            problems += [problem.replace("--layout", "--model_args", 1) for problem in error.problems]
        longest = source.spec.max_seq_len
        self.max_length = longest if max_length is None else max_length
        if not 1 < self.max_length <= longest:
            problems.append(f"--model_args max_length={max_length}: 2 to max_seq_len={longest} of the model is needed")
        if str(batch_size).split(":")[0] == "auto":
            batch_size = min(BATCH_SIZE, max_batch_size or BATCH_SIZE)
        if not str(batch_size).isdecimal() or not int(batch_size):
            problems.append(f"--batch_size {batch_size}: a number of sequences above 0, or auto, is needed")
        with collecting(problems):
            self.text = source.text()
            if not self.text.ends and self.text.begin is None:
                problems.append(
                    f"{path} names no token that starts or ends a text; give eos_token_id in its config.json"
                )
        if problems:
            raise InputError(*problems)
        self.path, self.batch_size, self.max_gen_toks = Path(path), int(batch_size), max_gen_toks
        self.on = "cpu" if device == "cpu" else "auto"  # lm-eval passes cuda by default

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return min(self.text.ends) if self.text.ends else int(self.text.begin or 0)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text whose tokens are all scored."""
        return self.eot_token_id if self.text.begin is None else self.text.begin

    @property
    def tokenizer_name(self) -> str:
        """The location of the tokenizer, for lm-eval's cache of requests."""
        return str(real_path(self.path)).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return token ids, with the tokens that the tokenizer adds unless they are already there or disabled."""
        if add_special_tokens is None:
            begin = self.text.tokenizer.id_to_token(self.prefix_token_id) or ""
            add_special_tokens = self.text.begins and not (begin and string.startswith(begin))
        return self.text.encode(string, add_special_tokens)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts. A text longer than `max_length` is scored in parts, each with as
        many preceding tokens as fit."""
        pairs, owners = [], []
        for number, (text,) in enumerate(request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, windows):
                pairs.append((None, context, continuation))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (value, _) in zip(owners, self._loglikelihood_tokens(pairs), strict=True):
            totals[number] += value
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        problems = [
            f"a continuation has {len(continuation)} tokens, and max_length={self.max_length}; shorten {text!r:.60}"
            if continuation
            else f"{text!r:.60}: the tokenizer joins the continuation to the last token of the text before it, so none "
            f"of its own is left to score; let a space stand between them"
            for text, _, continuation in requests
            if not 0 < len(continuation) <= self.max_length
        ]
        if problems:
            raise InputError(*problems)
        sequences = {
            number: ((context + continuation)[-(self.max_length + 1) :], len(continuation))
            for number, (_, context, continuation) in enumerate(requests)
        }
        scores = score(ScoreRequest(self.path, sequences, self.layout, self.batch_size, self.on))
        answers = [(result.log_likelihood, result.greedy) for result in scores]
        for request, answer in zip(requests, answers, strict=True):
            if request[0] is not None:
                self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each context until one of its stop texts or the end of the text. Requests with equal settings are
        batched."""
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(number)
        answers = [""] * len(requests)
        for numbers in alike.values():
            texts = self._generate([requests[number].args[0] for number in numbers], requests[numbers[0]].args[1])
            for number, text in zip(numbers, texts, strict=True):
                answers[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return answers

    def _generate(self, contexts: Sequence[str], wanted: dict[str, Any]) -> Iterable[str]:
        settings = normalize_gen_kwargs(wanted, self.max_gen_toks)
        if unknown := sorted(settings.keys() - GENERATION_KEYS):
            raise InputError(
                f"a task asks for generation with {', '.join(unknown)}; supported: {', '.join(sorted(GENERATION_KEYS))}"
            )
        n_tokens = int(settings["max_gen_toks"])
        if n_tokens >= self.max_length:
            raise InputError(
                f"a task asks for {n_tokens} new tokens, and max_length={self.max_length} leaves no room for a prompt; "
                f"give fewer, such as --gen_kwargs max_gen_toks={self.max_length // 2}"
            )
        sampling = Sampling(
            float(settings["temperature"]) if settings["do_sample"] else None,
            int(settings.get("top_k", 0)),
            float(settings.get("top_p", 1.0)),
            int(settings.get("seed", 0)),
        )
        ends = [self.text.tokenizer.id_to_token(token) for token in self.text.ends]
        stop = tuple(filter(None, [*settings.get("until", []), *ends]))
        prompts = tuple(tuple(self.tok_encode(context)[-(self.max_length - n_tokens) :]) for context in contexts)
        answer = generate(
            GenerationRequest(self.path, prompts, n_tokens, sampling, self.layout, self.batch_size, self.on, stop=stop)
        )
        assert answer is not None
        return [completion.text for completion in answer.completions]


def main() -> None:
    """Run lm-eval's command. Input errors are printed without a traceback."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except InputError as error:
        for problem in error.problems:
            print(f"error: {visible(problem)}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
