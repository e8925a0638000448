"""The section [optimizer] of the run file. Its options are the options of the optimizer's row."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, create_model, model_validator

from shardwright.config.sections import RENAMED, BrokenRules, RunFileSection
from shardwright.model.row import Kind, Row
from shardwright.optimizers import OPTIMIZERS, OptimizerKind
from shardwright.system.errors import nearest
from shardwright.system.synonyms import called_here

Factor = Annotated[float, Field(ge=0)]


def _by_kind(name: str, doc: str, quantity: str) -> Any:
    """Return a section with an optional number for each kind of trained parameter (`model.modules`)."""
    kinds = [kind for kind in get_args(Kind) if kind != "balance"]
    says = {"matrix": "hidden matrices but experts"}
    fields: dict[str, Any] = {
        kind: (Factor | None, Field(None, description=f"{quantity} of {says.get(kind, f'parameters of kind {kind}')}"))
        for kind in kinds
    }
    return create_model(name, __base__=RunFileSection, __doc__=doc, **fields)


LrScaleSection: Any = _by_kind("LrScaleSection", "Learning rates by kind of parameter / lr.", "learning rate / lr")
WeightDecaySection: Any = _by_kind(
    "WeightDecaySection", "Weight decay by kind of parameter, instead of weight_decay.", "weight decay"
)


def _with_one_of(*keys: str) -> str:
    """Return the names of the optimizers that have one of these options, as text."""
    return " and ".join(repr(name) for name, kind in OPTIMIZERS.items() if not kind.options.keys().isdisjoint(keys))


class OptimizerSection(RunFileSection):
    """The optimizer, its learning rate and its options; which options there are depends on `name`."""

    model_config = ConfigDict(extra="allow")

    name: str = Field("adamw", description=f"{', '.join(OPTIMIZERS)}, or an optimizer registered by an extension")
    lr: float = Field(3e-4, gt=0, description="peak learning rate")
    weight_decay: float = Field(0.1, ge=0, description="decoupled decay of matrices; vectors are never decayed")
    clip_norm: float = Field(
        1.0, ge=0, description="gradients are scaled down to this global norm if it is larger; 0: never"
    )
    state_dtype: Literal["parameters", "bf16"] = Field(
        "parameters",
        description="type in which optimizer states are stored: the type of the parameters (fp32), or bf16; either way "
        "they are computed in the type of the parameters",
    )
    lr_scale: LrScaleSection = Field(
        default_factory=LrScaleSection, description="[optimizer.lr_scale]: learning rates by kind of parameter / lr"
    )
    weight_decay_by_kind: WeightDecaySection = Field(
        default_factory=WeightDecaySection,
        description="[optimizer.weight_decay_by_kind]: weight decay by kind of parameter, instead of weight_decay",
    )

    @model_validator(mode="before")
    @classmethod
    def _with_default_options(cls, given: Any) -> Any:
        kind = OPTIMIZERS.get(given.get("name", "adamw")) if isinstance(given, dict) else None
        return given if kind is None else {key: option.default for key, option in kind.options.items()} | given

    @model_validator(mode="after")
    def _options_are_known(self) -> "OptimizerSection":
        kind = OPTIMIZERS.get(self.name)
        given = self.model_extra or {}
        if kind is None:
            options = {name for optimizer in OPTIMIZERS.values() for name in optimizer.options}
            valid = sorted({*type(self).model_fields, *options})
            raise BrokenRules(
                f"optimizer.name={self.name!r} is not known; {nearest(self.name, OPTIMIZERS)}",
                *(
                    f"optimizer.{key}: there is no such key for any optimizer; {nearest(key, valid)}"
                    for key in given
                    if key not in options
                ),
            )
        problems = [problem for key, value in given.items() if (problem := self._problem(kind, key, value))]
        if not problems:
            problems = [*kind.problems(self.options)]
            problems += kind.narrow_problems(self.options) if self.state_dtype == "bf16" else ()
        if problems:
            raise BrokenRules(*problems)
        return self

    def _problem(self, kind: OptimizerKind, key: str, value: Any) -> str | None:
        """Return the problem of an option's value, or None."""
        option = kind.options.get(key)
        if option is None:
            if new := RENAMED.get(f"optimizer.{key}"):
                return f"optimizer.{key} is called {new} now; rename it"
            unknown = f"optimizer.{key}: there is no such key for {self.name!r}"
            valid = {*type(self).model_fields, *kind.options}
            if others := _with_one_of(key):
                return f"{unknown}; it is one of {others}"
            meant = [name.removeprefix("optimizer.") for name in called_here(key) or ()]
            if valid.isdisjoint(meant) and (others := _with_one_of(*meant)):
                return f"{unknown}; it is {' and '.join(map(repr, meant))} here, of {others}"
            return f"{unknown}; {nearest(key, valid)}"
        if isinstance(option.default, bool):
            return None if isinstance(value, bool) else f"optimizer.{key}={value!r}: true or false is needed"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"optimizer.{key}={value!r}: a number is needed"
        if option.whole and value != int(value):
            return f"optimizer.{key}={value:g}: a whole number is needed"
        if option.least <= value < option.below:
            return None
        rule = f"from {option.least:g}" + (f" to below {option.below:g}" if option.below < math.inf else "")
        return f"optimizer.{key}={value:g} is not {rule}"

    @property
    def kind(self) -> OptimizerKind:
        """The registered row of the optimizer."""
        return OPTIMIZERS[self.name]

    @property
    def options(self) -> dict[str, float]:
        """Return the value of each of its options; true is 1."""
        return {key: float(value) for key, value in (self.model_extra or {}).items()}

    def lr_scale_of(self, row: Row) -> float:
        """Return the learning rate of a parameter divided by `lr`, with muP's factor."""
        given: float | None = getattr(self.lr_scale, row.kind)
        return row.lr_factor * (1.0 if given is None else given)

    def weight_decay_of(self, row: Row) -> float:
        """Return the weight decay of a parameter, with muP's factor."""
        given: float | None = getattr(self.weight_decay_by_kind, row.kind)
        return row.decay_factor * (given if given is not None else self.weight_decay if row.decays else 0.0)

    def eps_of(self, row: Row) -> float | None:
        """Return the `eps` of a parameter, with muP's factor; None for an optimizer without it."""
        return self.options["eps"] * row.eps_factor if "eps" in self.options else None

    def mup_problems(self) -> Iterator[str]:
        """Yield why the learning rates of a model with muP are not known for this optimizer."""
        if not self.kind.normalised:
            able = ", ".join(name for name, kind in OPTIMIZERS.items() if kind.normalised)
            yield (
                f"model.mup with optimizer.name={self.name!r}: the rule for learning rates holds for updates whose "
                f"elements have about the size of lr (Tensor Programs V, Table 8, Adam); valid: {able}"
            )
