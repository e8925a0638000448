"""Selective recomputation: cheap parts of a block are computed again in the backward pass, instead of kept for it.

A part is a function of tensors, such as silu(gate) * up. The forward pass keeps the part's inputs, which other
operations keep anyway, and not its output. Where an operation saves that output, or a view of it, for the backward pass
(the matmul that reads it), the block saves a reference instead; the first reference that the backward pass reads
computes the part again, once for all of them, with its graph. The backward pass of the part uses that graph and frees
what was computed.

    forward    gate, up --part--> y --matmul--> z        kept: gate, up
    backward   dz: y is computed again from gate, up; dW = dz^T y, dy = dz W; then dgate, dup from the graph of y

The same operations run on the same values as without recomputation, so the loss is equal bit for bit. The gradients are
too, up to the order in which those that meet at one tensor are added: RMSNorm on a CPU has two for its input.

What is decided, such as the experts of a token, is decided once, also in a block that runs again as a whole
(`checkpointed`): where rounding differs between the two passes, gradients would else be those of other experts.

Matmuls, attention and collectives outside of the parts run once, unlike under `torch.utils.checkpoint`, which runs all
that stands before the last saved tensor. Megatron-LM has the same idea, as `--recompute-modules`.

In a block that is compiled as one region a part is a region of `torch.utils.checkpoint`: its operations are tagged, and
the compiler's partitioner places them in the graph of the backward pass.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwright.torch_private import FakeTensor, keep_compiled_side_effects_once, storage_id, tensor_version

Part = Callable[..., Tensor | tuple[Tensor, ...]]
"""Takes tensors; returns one or several, each in storage of its own or of one of the inputs."""


class Kept(Protocol):
    """What is kept in the place of a tensor that is saved for the backward pass."""

    def read(self) -> Tensor:
        """The tensor."""


Keep = Callable[[Tensor], Tensor | Kept]
"""What is kept of a tensor that no part computes again; itself, or something in another place."""

_names: frozenset[str] = frozenset()
"""Names of the parts that are recomputed in the block that runs."""
_one_region = False
"""Whether the block that runs is compiled as one region, its parts included."""
_keep_elsewhere: Keep | None = None
"""What keeps the tensors of the block that runs; None: they are kept themselves."""
_outputs: dict[int, "_Output"] = {}
"""In the block that runs, the outputs of its recomputed parts, by their storage."""
_decisions: "_Decisions | None" = None
"""Those of the block that runs, if it runs again as a whole."""


def recompute_parts(
    block: nn.Module, names: Collection[str], keep: Keep | None = None, *, one_region: bool = False
) -> None:
    """Let the parts of a block that have one of these names be recomputed in its backward pass, and `keep` say what is
    kept of other tensors. `one_region`: the block's forward pass is compiled, and its parts with it; in a compiled
    block without it, parts run uncompiled between compiled pieces."""
    own = block.forward

    # The forward pass of the block may be compiled; the hooks around it are not.
    @torch.compiler.disable(recursive=False)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return own(*args, **kwargs)
        with _recomputing(frozenset(names), keep, one_region):
            return own(*args, **kwargs)

    block.forward = forward


def checkpointed(forward: Callable[..., Any], *, decides: bool, compiled: bool = False) -> Callable[..., Any]:
    """The forward pass of a block of which only the inputs are kept; it runs again in the backward pass (Chen et al.,
    arXiv 1604.06174). `decides`: whether it calls `decided`; `compiled`: whether it is going to be compiled.

    No random state is saved: dropout masks depend on keys, which are among the inputs.
    """
    if compiled:
        # What the block notes of itself (`MoE.last_load`) is noted once.
        keep_compiled_side_effects_once()

    def run(*args: Any, **kwargs: Any) -> Any:
        if compiled:
            return _compiled_checkpoint(forward, *args, **kwargs)
        again = _Decisions(forward) if decides else forward
        return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


def _compiled_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, whose operations the compiler computes again in the backward pass; it keeps choices
    of experts.

    The policy tags each operation as it is traced. Without a policy PyTorch tags the calls in `function` itself, and
    keeps all that an `autograd.Function` computes: a step of SmolLM2-1.7B in bf16 had a peak of 43.8 GiB in place of
    27.8.
    """
    return checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_all_but_choices, **kwargs
    )


def decided(decide: Callable[[], Tensor]) -> Tensor:
    """`decide()`, numbers below 2^31; where the block runs again, what it was the first time."""
    if torch.compiler.is_compiling() or _decisions is None:
        return decide()
    return _decisions.next(decide)


class _Decisions:
    """One forward pass of a block, which runs again in the backward pass, and what it decided the first time."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self._made: list[Tensor] = []
        self._taken = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        global _decisions
        before, _decisions, self._taken = _decisions, self, 0
        try:
            return self.forward(*args, **kwargs)
        finally:
            _decisions = before

    def next(self, decide: Callable[[], Tensor]) -> Tensor:
        """The next decision, which is made if the block has not run before."""
        if self._taken == len(self._made):
            self._made.append(decide().int())
        self._taken += 1
        return self._made[self._taken - 1].long()


def _all_but_choices() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    chooses = operation is torch.ops.aten.topk.default
    return CheckpointPolicy.MUST_SAVE if chooses else CheckpointPolicy.MUST_RECOMPUTE


# PyTorch warns once of operations in place, of which these regions have none.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda record: "context_fn is passed" not in record.msg)


@contextmanager
def _recomputing(names: frozenset[str], keep: Keep | None = None, one_region: bool = False) -> Iterator[None]:
    global _names, _outputs, _keep_elsewhere, _one_region
    before = _names, _outputs, _keep_elsewhere, _one_region
    _names, _outputs, _keep_elsewhere, _one_region = names, {}, keep, one_region
    try:
        with torch.autograd.graph.saved_tensors_hooks(_keep, _read):
            yield
    finally:
        _names, _outputs, _keep_elsewhere, _one_region = before


def part(name: str, compute: Part, *inputs: Tensor, weights: Sequence[Tensor] = (), compiles: bool = True) -> Any:
    """`compute(*inputs)`, which the backward pass computes again if the block that runs recomputes parts of this name.

    `weights`: parameters that `compute` reads beside its inputs, those of `compute` itself if it is a module. It must
    return the same values whenever it is called, and so draw no random numbers but by keys. `compiles`: the compiler
    can go through it.
    """
    # Without gradients nothing is kept; that is also so inside of another part, which computes all of itself again.
    if name not in _names or not torch.is_grad_enabled():
        return compute(*inputs)
    if _one_region and compiles and torch.compiler.is_compiling():
        return _compiled_checkpoint(compute, *inputs)
    own = compute.parameters() if isinstance(compute, nn.Module) else ()
    return _run(compute, inputs, [*own, *weights])


@torch.compiler.disable
def _run(compute: Part, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Any:
    again = _Again(compute, inputs, weights)
    found = _Part.apply(again, *inputs, *weights)
    for number, y in enumerate(found if isinstance(found, tuple) else (found,)):
        storage = StorageWeakRef(y.untyped_storage())
        _outputs[storage.cdata] = _Output(again, number, storage, tensor_version(y))
    return found


class _Output(NamedTuple):
    """An output of a part. While the weak reference lives, no other storage has its number."""

    again: "_Again"
    number: int
    storage: StorageWeakRef
    version: int


class _View(NamedTuple):
    """What is kept in the place of an output of a part, or of a view of it."""

    again: "_Again"
    number: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def read(self) -> Tensor:
        """The view, of what the part computes again."""
        y = self.again.outputs()[self.number].detach()
        if y.dtype != self.dtype:
            y = y.view(self.dtype)
        return y.as_strided(self.size, self.stride, self.offset)


def _keep(x: Tensor) -> Tensor | Kept:
    """What is kept of a tensor that is saved for the backward pass: a reference if a part can compute it again."""
    if type(x) in (Tensor, FakeTensor) and _outputs:
        found = _outputs.get(storage_id(x.untyped_storage()))
        # An output that was changed in place since is not what the part computes.
        if found is not None and found.version == tensor_version(x):
            return _View(found.again, found.number, x.dtype, x.size(), x.stride(), int(x.storage_offset()))
    return x if _keep_elsewhere is None else _keep_elsewhere(x)


def _read(kept: Tensor | Kept) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.read()


class _Again:
    """One call of a part: what it is computed from, and in the backward pass its outputs with their graph."""

    def __init__(self, compute: Part, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        self.compute: Part | None = compute
        self.weights = weights
        self.kept = [_keep(x.detach()) for x in inputs]
        self.differentiable = [x.requires_grad for x in inputs]
        self.inputs: list[Tensor] = []
        self._outputs: tuple[Tensor, ...] | None = None

    def outputs(self) -> tuple[Tensor, ...]:
        """The outputs, computed when they are asked for first."""
        if self._outputs is None:
            if self.compute is None:
                raise RuntimeError("a recomputed part was read after its backward pass; backward runs once a graph")
            pairs = zip(self.kept, self.differentiable, strict=True)
            self.inputs = [_read(x).detach().requires_grad_(differentiable) for x, differentiable in pairs]
            with torch.enable_grad():
                found = self.compute(*self.inputs)
            self._outputs = found if isinstance(found, tuple) else (found,)
        return self._outputs

    def gradients(self, dys: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of inputs and weights, None where there is none; frees what was kept."""
        given = [(y, dy) for y, dy in zip(self.outputs(), dys, strict=True) if dy is not None]
        wanted = [x for x in (*self.inputs, *self.weights) if x.requires_grad]
        found: list[Tensor | None] = [None] * len(wanted)
        if given:
            ys, gradients = zip(*given, strict=True)
            found = list(torch.autograd.grad(ys, wanted, gradients, allow_unused=True))
        grads = iter(found)
        by_argument = [next(grads) if x.requires_grad else None for x in (*self.inputs, *self.weights)]
        self.compute, self.kept, self.inputs, self.weights, self._outputs = None, [], [], (), None
        return by_argument


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, again: _Again, *inputs_then_weights: Tensor) -> Any:
        ctx.again = again
        ctx.set_materialize_grads(False)
        assert again.compute is not None
        return again.compute(*inputs_then_weights[: len(again.kept)])

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.again.gradients(dys)
