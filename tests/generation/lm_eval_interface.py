"""What our class for lm-eval uses of lm-eval, in a version of our own: `make test` is without that package, which needs
29 others. Where lm-eval is installed, as in `make prove`, it is lm-eval itself, and a test compares the two.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any

INSTALLED = find_spec("lm_eval") is not None
Pair = tuple[list[int], list[int]]


class Cache:
    """Keeps nothing of the answers that it is given."""

    def add_partial(self, kind: str, request: Any, answer: Any) -> None: ...


class TemplateLM:
    """A model that scores token ids: texts are encoded here."""

    def __init__(self) -> None:
        self.cache_hook = Cache()

    prefix_token_id: int
    tok_encode: Callable[..., list[int]]
    _loglikelihood_tokens: Callable[..., list[tuple[float, bool]]]

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation after its context, and whether it is the most probable one."""
        pairs = [(each.args, *self._encoded(*each.args)) for each in requests]
        return self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm)

    def _encoded(self, context: str, continuation: str) -> Pair:
        if not context:
            ids = self.tok_encode(continuation, add_special_tokens=False)
            return (ids[:1], ids[1:]) if ids[0] == self.prefix_token_id else ([self.prefix_token_id], ids)
        kept = context.rstrip()  # spaces belong to the word after them
        before = self.tok_encode(kept)
        return before, self.tok_encode(context + continuation)[len(before) :]


def get_rolling_token_windows(
    token_list: list[int], prefix_token: int, max_seq_len: int, context_len: int
) -> Iterator[Pair]:
    """Inputs and targets of windows that predict each token once; the last has as many inputs as the others."""
    tokens, step = [prefix_token, *token_list], max_seq_len - context_len + 1
    ends = [min(max_seq_len, len(token_list))] if token_list else []
    while ends and ends[-1] < len(token_list):
        ends.append(min(ends[-1] + step, len(token_list)))
    for start, end in zip([0, *ends], ends, strict=False):
        yield tokens[max(0, end - max_seq_len) : end], token_list[start:end]


def make_disjoint_window(window: Pair) -> Pair:
    """The inputs before the first target, and the targets."""
    inputs, targets = window
    return inputs[: len(inputs) - len(targets) + 1], targets


def normalize_gen_kwargs(gen_kwargs: dict[str, Any], default_max_gen_toks: int = 256) -> dict[str, Any]:
    """What a task wants of generation, with `until`, `max_gen_toks` and `do_sample`."""
    until = gen_kwargs.get("until", [])
    found = gen_kwargs | {
        "until": until if isinstance(until, list) else [until],
        "max_gen_toks": int(gen_kwargs.get("max_gen_toks", default_max_gen_toks)),
        "do_sample": gen_kwargs.get("do_sample", float(gen_kwargs.get("temperature", 0.0)) > 0),
    }
    return found if found["do_sample"] or "do_sample" not in gen_kwargs else found | {"temperature": 0.0}


def _named(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(content)
    return module


def model_class() -> Any:
    """`ShardwrightLM`, on lm-eval or on what is here."""
    windows = {each.__name__: each for each in (get_rolling_token_windows, make_disjoint_window)}
    modules = [
        *(_named(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.models")),
        _named("lm_eval.api.model", TemplateLM=TemplateLM),
        _named("lm_eval.api.registry", register_model=lambda _: lambda each: each),
        _named("lm_eval.models.utils", normalize_gen_kwargs=normalize_gen_kwargs),
        _named("lm_eval.utils", **windows),
    ]
    names = [] if INSTALLED else [each.__name__ for each in modules]
    sys.modules.update({each.__name__: each for each in modules if each.__name__ in names})
    try:
        from shardwright.lm_eval import ShardwrightLM
    finally:
        for name in names:
            del sys.modules[name]
    return ShardwrightLM
