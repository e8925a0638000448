"""Selective recomputation: cheap parts of a block are computed again in the backward pass instead of being saved.

A part is a function of tensors, such as silu(gate) * up. The forward pass keeps the part's inputs, which other
operations save anyway, and not its output. If an operation (the matmul that reads it) saves that output or a view of it
for the backward pass, the block saves a reference instead. The first reference that the backward pass reads computes
the part again, once for all references, with its graph. The backward pass of the part uses that graph and frees the
recomputed tensors.

    forward    gate, up --part--> y --matmul--> z        kept: gate, up
    backward   dz: y is computed again from gate, up; dW = dz^T y, dy = dz W; then dgate, dup from the graph of y

The same operations run on the same values as without recomputation, so the loss is equal bit for bit. So are the
gradients, except for the order in which gradients of one tensor are added: RMSNorm on a CPU has two for its input.

Choices, such as the experts of a token, are made once, even in a block that runs again as a whole (`checkpointed`): if
rounding differed between the two passes, gradients would belong to other experts.

Matmuls, attention and collectives outside of the parts run once, unlike under `torch.utils.checkpoint`, which runs all
operations before the last saved tensor again. Megatron-LM has the same idea, as `--recompute-modules`.

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

from shardwright.model.dropout import drawn_again
from shardwright.system.torch_private import FakeTensor, keep_compiled_side_effects_once, storage_id, tensor_version

Part = Callable[..., Tensor | tuple[Tensor, ...]]
"""Takes tensors; returns one or several tensors, each in its own storage or an input's."""


class SavedTensor(Protocol):
    """A handle that is saved instead of a tensor for the backward pass."""

    def read(self) -> Tensor:
        """Return the tensor."""


Keep = Callable[[Tensor], Tensor | SavedTensor]
"""Maps a tensor that no part computes again to the object to save: itself, or a handle of a copy elsewhere."""

_names: frozenset[str] = frozenset()
"""Names of the parts that are recomputed in the block that runs."""
_one_region = False
"""Whether the block that runs is compiled as one region, its parts included."""
_keep_elsewhere: Keep | None = None
"""Saves the tensors of the block that runs; None: they are saved themselves."""
_outputs: dict[int, "_RecomputedOutput"] = {}
"""Outputs of recomputed parts of the block that runs, by their storage."""
_decisions: "_Decisions | None" = None
"""The choices of the block that runs, if it runs again as a whole."""


def recompute_parts(
    block: nn.Module, names: Collection[str], keep: Keep | None = None, *, one_region: bool = False
) -> None:
    """Make the parts of a block with these names be recomputed in its backward pass; `keep` maps other saved tensors to
    the objects to save. `one_region`: the block's forward pass is compiled, and its parts with it; in a compiled block
    without it, parts run uncompiled between compiled pieces."""
    block_forward = block.forward

    # The forward pass of the block may be compiled; the hooks around it are not.
    @torch.compiler.disable(recursive=False)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return block_forward(*args, **kwargs)
        with _recomputing(frozenset(names), keep, one_region):
            return block_forward(*args, **kwargs)

    block.forward = forward


def checkpointed(forward: Callable[..., Any], *, decides: bool, compiled: bool = False) -> Callable[..., Any]:
    """Return the forward pass of a block, which saves only its inputs and runs again in the backward pass (Chen et al.,
    arXiv 1604.06174). `decides`: whether it calls `decided`; `compiled`: whether it will be compiled.

    No random state is saved: dropout masks depend on keys, which are among the inputs.
    """
    if compiled:
        # State that the block records about itself (`MoE.last_load`) is recorded once.
        keep_compiled_side_effects_once()

    def run(*args: Any, **kwargs: Any) -> Any:
        if compiled:
            return _compiled_checkpoint(forward, *args, **kwargs)
        again = drawn_again(_Decisions(forward) if decides else forward)
        return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


def _compiled_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function`, whose operations the compiler computes again in the backward pass, except choices of experts.

    The policy tags each operation as it is traced. Without a policy PyTorch tags the calls in `function` itself and
    saves everything that an `autograd.Function` computes: a step of SmolLM2-1.7B in bf16 had a peak of 43.8 GiB instead
    of 27.8 GiB.
    """
    return checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_all_but_choices, **kwargs
    )


def decided(decide: Callable[[], Tensor]) -> Tensor:
    """Return `decide()`, numbers below 2^31; if the block runs again, the result of the first time."""
    if torch.compiler.is_compiling() or _decisions is None:
        return decide()
    return _decisions.next(decide)


class _Decisions:
    """One forward pass of a block that runs again in the backward pass, and its choices of the first time."""

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
        """Return the next choice, which is made if the block has not run before."""
        if self._taken == len(self._made):
            self._made.append(decide().int())
        self._taken += 1
        return self._made[self._taken - 1].long()


def _all_but_choices() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    chooses = operation is torch.ops.aten.topk.default
    return CheckpointPolicy.MUST_SAVE if chooses else CheckpointPolicy.MUST_RECOMPUTE


# PyTorch warns once about operations in place, which these regions do not have.
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
    """Return `compute(*inputs)`, which the backward pass computes again if the block that runs recomputes this part.

    `weights`: parameters that `compute` reads next to its inputs; a module's own parameters are added. It must return
    the same values whenever it is called, and so draw random numbers only by keys. `compiles`: the compiler can trace
    it.
    """
    # Without gradients nothing is saved; this includes calls inside of another part, which recomputes all of itself.
    if name not in _names or not torch.is_grad_enabled():
        return compute(*inputs)
    if _one_region and compiles and torch.compiler.is_compiling():
        return _compiled_checkpoint(compute, *inputs)
    own = compute.parameters() if isinstance(compute, nn.Module) else ()
    return _run(compute, inputs, [*own, *weights])


@torch.compiler.disable
def _run(compute: Part, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Any:
    again = _RecomputedCall(compute, inputs, weights)
    outputs = _RecomputedPart.apply(again, *inputs, *weights)
    for number, y in enumerate(outputs if isinstance(outputs, tuple) else (outputs,)):
        storage = StorageWeakRef(y.untyped_storage())
        _outputs[storage.cdata] = _RecomputedOutput(again, number, storage, tensor_version(y))
    return outputs


class _RecomputedOutput(NamedTuple):
    """An output of a part. While the weak reference lives, no other storage has its number."""

    again: "_RecomputedCall"
    number: int
    storage: StorageWeakRef
    version: int


class _RecomputedView(NamedTuple):
    """A handle that replaces a saved output of a part, or a view of it."""

    again: "_RecomputedCall"
    number: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def read(self) -> Tensor:
        """Return the view of the recomputed output."""
        y = self.again.outputs()[self.number].detach()
        if y.dtype != self.dtype:
            y = y.view(self.dtype)
        return y.as_strided(self.size, self.stride, self.offset)


def _keep(x: Tensor) -> Tensor | SavedTensor:
    """Return the object to save for the backward pass instead of a tensor: a reference if a part can recompute it."""
    if type(x) in (Tensor, FakeTensor) and _outputs:
        output = _outputs.get(storage_id(x.untyped_storage()))
        # An output that was changed in place later differs from the part's result.
        if output is not None and output.version == tensor_version(x):
            return _RecomputedView(output.again, output.number, x.dtype, x.size(), x.stride(), int(x.storage_offset()))
    return x if _keep_elsewhere is None else _keep_elsewhere(x)


def _read(kept: Tensor | SavedTensor) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.read()


class _RecomputedCall:
    """One call of a part: its inputs, and in the backward pass its outputs with their graph."""

    def __init__(self, compute: Part, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        self.compute: Part | None = drawn_again(compute)
        self.weights = weights
        self.kept = [_keep(x.detach()) for x in inputs]
        self.differentiable = [x.requires_grad for x in inputs]
        self.inputs: list[Tensor] = []
        self._outputs: tuple[Tensor, ...] | None = None

    def outputs(self) -> tuple[Tensor, ...]:
        """Return the outputs, computed on the first call."""
        if self._outputs is None:
            if self.compute is None:
                raise RuntimeError("a recomputed part was read after its backward pass; backward runs once a graph")
            pairs = zip(self.kept, self.differentiable, strict=True)
            self.inputs = [_read(x).detach().requires_grad_(differentiable) for x, differentiable in pairs]
            with torch.enable_grad():
                outputs = self.compute(*self.inputs)
            self._outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return self._outputs

    def gradients(self, dys: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of inputs and weights, None if there is none, and free the saved tensors."""
        given = [(y, dy) for y, dy in zip(self.outputs(), dys, strict=True) if dy is not None]
        wanted = [x for x in (*self.inputs, *self.weights) if x.requires_grad]
        results: list[Tensor | None] = [None] * len(wanted)
        if given:
            ys, gradients = zip(*given, strict=True)
            results = list(torch.autograd.grad(ys, wanted, gradients, allow_unused=True))
        grads = iter(results)
        by_argument = [next(grads) if x.requires_grad else None for x in (*self.inputs, *self.weights)]
        self.compute, self.kept, self.inputs, self.weights, self._outputs = None, [], [], (), None
        return by_argument


class _RecomputedPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, again: _RecomputedCall, *inputs_then_weights: Tensor) -> Any:
        ctx.again = again
        ctx.set_materialize_grads(False)
        assert again.compute is not None
        return again.compute(*inputs_then_weights[: len(again.kept)])

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.again.gradients(dys)
