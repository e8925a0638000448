"""Times of static batches and of an instance at its maximum load, computed from the time of a pass.

All functions take numbers or arrays (n,) and return arrays. Each of the `requests` of an instance has a prompt of
`input_len` tokens and an answer of `output_len` tokens.
"""

import numpy as np
from numpy.typing import ArrayLike

from shardwright.cost.job import Floats
from shardwright.cost.ledger import Formulas
from shardwright.serving.setting import PassBatch, Serving, Settings
from shardwright.serving.work import latency_s, period_s


def prefill_s(serving: Serving, settings: Settings, requests: ArrayLike, input_len: ArrayLike) -> Floats:
    """Return the seconds until each request of a batch has its first token, in one pass over all prompts."""
    tokens = np.asarray(requests, dtype=np.float64)
    prompt = PassBatch(prompt=tokens * np.asarray(input_len), attended=np.asarray(input_len) / 2, logits=tokens)
    return latency_s(serving, settings, prompt)


def decode_s(serving: Serving, settings: Settings, requests: ArrayLike, context: ArrayLike) -> Floats:
    """Return the seconds of one further token for each request of a batch, whose mean cached tokens are `context`."""
    return period_s(serving, settings, PassBatch(requests=requests, context=context, logits=requests))


def middle(input_len: ArrayLike, output_len: ArrayLike) -> Floats:
    """Return the mean cached tokens of a request that decodes. Time is linear, so they have the mean time."""
    return np.asarray(input_len) + np.asarray(output_len) / 2.0


def generation_s(
    serving: Serving, settings: Settings, requests: ArrayLike, input_len: ArrayLike, output_len: ArrayLike
) -> Floats:
    """Return the seconds of a static batch: all its requests start together and end together."""
    first = prefill_s(serving, settings, requests, input_len)
    token_s = decode_s(serving, settings, requests, middle(input_len, output_len))
    f = Formulas("s", prefill=first, output_len=np.asarray(output_len), each_token=token_s)
    return f("whole generation", f.prefill + (f.output_len - 1) * f.each_token)


def prompt_in_passing_s(
    serving: Serving, settings: Settings, requests: ArrayLike, context: ArrayLike, input_len: ArrayLike,
    prompts: ArrayLike = 1.0,
) -> Floats:  # fmt: skip
    """Return the seconds by which reading `prompts` makes a pass of `requests` longer, per prompt."""
    together = PassBatch(
        requests=requests, context=context, prompt=np.asarray(prompts) * np.asarray(input_len),
        attended=np.asarray(input_len) / 2, logits=np.asarray(requests) + np.asarray(prompts),
    )  # fmt: skip
    longer = period_s(serving, settings, together) - decode_s(serving, settings, requests, context)
    return np.asarray(longer / np.asarray(prompts))


def full_load_tokens_per_s(
    serving: Serving, settings: Settings, requests: ArrayLike, input_len: ArrayLike, output_len: ArrayLike,
    max_tokens: ArrayLike,
) -> Floats:  # fmt: skip
    """Return output tokens per second of an instance that always has `requests` in its batch.

    Each request takes output_len parts of a pass, and its prompt a part of a pass of `max_tokens` tokens.
    """
    context = middle(input_len, output_len)
    prompts = np.maximum(1.0, np.minimum(np.asarray(max_tokens) / np.asarray(input_len), requests))
    prompt = prompt_in_passing_s(serving, settings, requests, context, input_len, prompts)
    decode = decode_s(serving, settings, requests, context)
    f = Formulas(
        "1/s", requests=np.asarray(requests), output_len=np.asarray(output_len), decode=decode, prompt_in_passing=prompt
    )  # fmt: skip
    seconds = f.output_len * f.decode + f.requests * f.prompt_in_passing
    return f("output tokens a second", f.requests * f.output_len / seconds)
