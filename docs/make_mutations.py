"""Write docs/mutations.md, the table of the known bugs that tests put into our code and see, from tests/training/bugs.

python docs/make_mutations.py
"""

import inspect
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from shardwright.layout.layout import Layout
from shardwright.verification import Case
from shardwright.verification.matrix import layouts

PAGE = Path(__file__).with_name("mutations.md")

HEAD = """\
# Known bugs that are caught

This page is made from `tests/training/bugs`. Do not edit it; run `python docs/make_mutations.py`.

{total} bugs are caught by a number: `shardwright verify`, a resume or a unit test shows something that is not equal.
Caught by a crash alone, and not counted here: {crashing}.

{families}

Each is put into our own code by a test, one at a time, as a change of one or a few expressions
(`tests/mutation.py:Mutation`). Some shipped in well-known systems and trained on there without an error; the others are
slips of the same kind: a wrong group, a swapped axis, a forgotten term, a wrong type.

- `tests/training/test_mutations.py:test_verify_sees_the_bug` requires that a number is off by a hundred tolerances,
  that a sum is one that was rounded to bfloat16, or that the bits of replicas differ.
- `tests/training/test_mutations.py:test_verify_reports_nothing_on_healthy_code` requires that the same layouts are
  equal without the bug.
- `tests/training/test_mutations.py:test_a_run_that_is_taken_up_shows_the_bug` saves a checkpoint, takes it up, and
  compares the parameters after the next step with those of healthy code.
- `tests/training/test_mutations.py:test_a_unit_test_sees_the_bug` requires that a test of another file fails.

A bug is put into the reference of `verify` too, which runs the same model: what both sides compute wrongly only a unit
test can see.

| caught by | meaning |
| --- | --- |
| `verify` | `shardwright verify` with default options, on a run file that has the layout |
| `--matrix 2`, `--matrix 4` | the layout is one of those that the matrix of so many ranks runs |
| `--dtype` | the type in which the bug is looked for; float64, the default, where none is given |
| with ... | what the run file has to have |
| resume | a run that is stopped and resumed |
| a test | the test that fails, or that puts the bug in itself and sees it |
| crash | a rank raises or hangs, and no number is wrong |

| family | file | what is wrong | caught by |
| --- | --- | --- | --- |
"""
FEATURES = {
    "dropout": "dropout",
    "moe": "experts",
    "activation": "activation {}",
    "tied_embedding": "a tied embedding",
    "latent_attention": "latent attention",
    "linear_attention": "linear attention",
    "attention_gate": "gated attention",
    "n_layers": "{} layers",
    "d_model": "a width of {}",
    "d_ffn": "a width of networks of {}",
    "mtp_modules": "{} module(s) of multi-token prediction",
    "n_kv_heads": "{} key-value head",
    "bias": "biases",
    "qk_norm": "norms of queries and keys",
    "positions": "{} positions",
    "qk_norm_whole": "over all heads",
    "qk_norm_heads": "with weights of each head",
    "norm_position": "norms of branches ({})",
    "parallel_branches": "parallel branches",
    "rope_fraction": "a rotated fraction of heads",
    "rope_scaling": "scaled rotary frequencies",
    "nope_interval": "no rotation in every {}nd layer",
    "window": "windows",
    "window_chunked": "which are chunks",
    "temperature_scale": "temperatures of queries",
    "temperature_interval": "",
    "attention_sinks": "sinks of attention",
    "attention_softcap": "soft caps",
    "logit_softcap": "soft caps",
    "lora": "adapters",
    "mup": "muP",
}
"""What a run file has to have, by the key of `ModelSpec` that a bug changes."""


def page() -> str:
    """The whole page."""
    sys.path[:0] = [str(PAGE.parents[1])]  # of the tests, which are no package that is installed
    try:
        from tests.training.bugs.tables import FAMILIES
    finally:
        del sys.path[0]
    rows = [(family, name, bug) for family, bugs in FAMILIES.items() for name, bug in bugs.items()]
    numbers = Counter(family for family, _, bug in rows if not bug.crashes)
    lines = ["| family | bugs |", "| --- | --- |", *(f"| {family} | {n} |" for family, n in numbers.items())]
    crashes = sum(bug.crashes for _, _, bug in rows)
    head = HEAD.format(total=numbers.total(), crashing=crashes, families="\n".join(lines))
    return head + "".join(
        f"| {family} | `{_room(bug)}` | {re.sub(r'^[0-9]+: ', '', name)} | {_caught_by(bug)} |\n"
        for family, name, bug in rows
    )


def _room(bug: Any) -> str:
    """The file that holds the code which is changed."""
    found = resolve_name(bug.mutation.function)
    found = inspect.unwrap(found.fget if isinstance(found, property) else found)
    module = found.__module__.replace(".", "/")
    return f"src/{module}.py"


def _caught_by(bug: Any) -> str:
    if hasattr(bug, "test"):
        way = f"`{bug.test}`"
    elif hasattr(bug, "dtype"):
        way = _by_verify(bug)
    else:
        way = "resume" + _feature_suffix([_feature(bug.spec)])
    return f"crash: {way}" if bug.crashes else way


_OFFLOADED = {"cpu": "optimizer states on the host", "disk": "optimizer states on a disk"}


def _by_verify(bug: Any) -> str:
    sizes = {layout.world_size for layout in bug.layouts if _in_matrix(bug.case(layout), layout)}
    ways = ["`verify`", *(f"`--matrix {n}`" for n in sorted(sizes))]
    if bug.dtype != "float64":
        ways.append(f"`--dtype {bug.dtype}`")
    # Latent attention has as many key-value heads as query heads.
    changed = {
        key: value for key, value in bug.spec.items() if key != "n_kv_heads" or "latent_attention" not in bug.spec
    }
    names = [FEATURES[key].format(value) for key, value in changed.items()]
    if any(layout.recompute == "full" for layout in bug.layouts):
        names.append("recomputation")
    wheres = {layout.offload_optimizer for layout in bug.layouts}
    names += [words for where, words in _OFFLOADED.items() if where in wheres]
    if bug.documents:
        names.append("packed documents")
    if bug.fp8 is not None:
        names.append(f"`precision.fp8={bug.fp8.recipe}`")
    if bug.optimizer != "adamw":
        names.append(f"optimizer {bug.optimizer}")
    return ", ".join(ways) + _feature_suffix(names)


def _in_matrix(case: Case, layout: Layout) -> bool:
    return layout.world_size > 1 and layout in _matrix(case, layout.world_size)


@cache
def _matrix(case: Case, world_size: int) -> frozenset[Layout]:
    return frozenset(layouts(case.spec, world_size, case.seq_len))


def _feature(spec: Any) -> str:
    return "experts" if spec.moe else "a tied embedding" if spec.tied_embedding else ""


def _feature_suffix(names: list[str]) -> str:
    found = ", ".join(filter(None, names))
    return f"; with {found}" if found else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
