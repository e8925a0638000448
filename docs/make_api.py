"""Write docs/api.md, the reference of `import shardwright`, from the docstrings of its public names.

python docs/make_api.py
"""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import shardwright
from shardwright import testing

PAGE = Path(__file__).with_name("api.md")

HEAD = """\
# The Python API

This page is made from the docstrings. Do not edit it; run `python docs/make_api.py`. [Python](python.md) shows the
functions in use. Names that are not on this page may change without notice.
"""
ORDER = (
    "Layout",
    "plan",
    "verify",
    "dryrun",
    "train",
    "load_run",
    "Run",
    "preset",
    "parallelize",
    "DistributedModel",
    "Continuation",
    "extend",
)
"""Functions before the classes that they return. ModelSpec and Transformer follow."""
TESTING = """\
# shardwright.testing

`from shardwright.testing import verify_trainer, TensorShard`: compares a trainer of any system with one process, also
inside pytest. [Verify trainers](verify-trainers.md) describes the class `Trainer`.
"""
TESTING_ORDER = ("verify_trainer", "World", "StepBatch", "TensorShard", "Decoder", "loss_sum")


def page() -> str:
    """The whole page."""
    rest = [name for name in shardwright.__all__ if name not in ORDER]
    entries = [_entry(name, getattr(shardwright, name)) for name in (*ORDER, *rest)]
    return "\n".join([HEAD, *entries, TESTING, *(_entry(name, getattr(testing, name)) for name in TESTING_ORDER)])


def _entry(name: str, public: Any) -> str:
    lines = [f"## {name}\n"]
    if inspect.isfunction(public):
        lines.append(_signature(name, public))
    lines.append(f"{inspect.getdoc(public)}\n")
    if dataclasses.is_dataclass(public) and (fields := [each for each in dataclasses.fields(public) if each.metadata]):
        lines += ["| argument | default | meaning |", "| --- | --- | --- |", *map(_field, fields), ""]
    if inspect.isclass(public) and not issubclass(public, Exception):
        ours = [each for each in public.__mro__ if each.__module__.startswith("shardwright")]
        for member, value in ((member, value) for each in ours for member, value in vars(each).items()):
            if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                lines += [f"### {name}.{member}\n"]
                if inspect.isfunction(value):
                    lines.append(_signature(member, value))
                lines.append(f"{inspect.getdoc(value)}\n")
    return "\n".join(lines)


def _field(each: dataclasses.Field[Any]) -> str:
    """A row of the table of a class's arguments: those that a run file has too say what they are."""
    default = "-" if each.default is dataclasses.MISSING else f"`{each.default!r}`".replace("'", '"')
    help = each.metadata["key"].help if "key" in each.metadata else each.metadata["help"]
    return f"| `{each.name}` | {default} | {help.replace('|', chr(92) + '|')} |"


def _signature(name: str, function: Any) -> str:
    """The call as Python: parameters with types and defaults, one a line where they do not fit into one."""
    signature = inspect.signature(function)
    parameters = [each for each in signature.parameters.values() if each.name != "self"]
    words = [_parameter(each) for each in parameters]
    if first := next((at for at, each in enumerate(parameters) if each.kind is each.KEYWORD_ONLY), None):
        words.insert(first, "*")
    elif parameters and parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
        words.insert(0, "*")
    returns = _annotation(signature.return_annotation)
    line = f"def {name}({', '.join(words)}) -> {returns}: ..."
    if len(line) > 110:
        line = f"def {name}(\n" + "".join(f"    {word},\n" for word in words) + f") -> {returns}: ..."
    return f"```python\n{line}\n```\n"


def _parameter(each: inspect.Parameter) -> str:
    value = f'"{each.default}"' if isinstance(each.default, str) else repr(each.default)
    default = "" if each.default is each.empty else f" = {value}"
    stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
    return f"{stars}{each.name}: {_annotation(each.annotation)}{default}"


def _annotation(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    modules = ("layout.layout", "model.spec", "model.transformer", "api.distributed")
    for module in (*(f"shardwright.{each}." for each in modules), "pathlib.", "collections.abc.", "typing.",
                   "torch.nn.parameter."):  # fmt: skip
        text = text.replace(module, "")
    return text.strip("'")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written to {PAGE}")
