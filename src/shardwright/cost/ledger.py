"""Record the inputs and results of the formulas of this package while they are evaluated.

A formula is arithmetic on the symbols of a `Formulas`. Outside of `record` a symbol is the number or array that was
given, and the formula is plain NumPy at the cost of one check. Within `record` it is a `Traced`, which computes the
same and writes down the arithmetic, so each formula becomes a `LedgerEntry`, which `plan --explain` prints and a test
evaluates again. Other code (groups of ranks, a schedule) calls `note` to record a value that it has computed. Layouts
are recorded one at a time.

The symbols of the ledger's formulas, with their units. Other names in a formula are names of entries.
"""

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import ArrayLike

from shardwright.cost.job import Floats, Ints

Inputs = dict[str, ArrayLike]
Number = float | tuple[float, ...]


@dataclass(frozen=True)
class LedgerEntry:
    """One evaluation of a formula: the quantity `what` of a `section` has `value`, in `unit`.

    `formula`: a Python expression over the names of `inputs` with max, min, sum (over stages), ceil and log2; steps
    before it, `name = expression`, are separated by semicolons. It is empty for a value from a simulation or a table,
    which `source` then names. A name of `inputs` is a symbol of `cost.ledger`, or the `identifier` of another entry,
    with that entry's value.
    """

    section: str
    what: str
    formula: str
    inputs: Mapping[str, Number]
    value: Number
    unit: str
    source: str


@dataclass
class _Book:
    entries: list[LedgerEntry] = field(default_factory=list)
    section: str = ""


_BOOK: ContextVar[_Book | None] = ContextVar("_BOOK", default=None)
_NAME = re.compile(r"[A-Za-z_]\w*")


@contextmanager
def record() -> Iterator[list[LedgerEntry]]:
    """Collect the entries recorded in this context, in order; equal entries are recorded once."""
    book = _Book()
    token = _BOOK.set(book)
    try:
        yield book.entries
    finally:
        _BOOK.reset(token)


@contextmanager
def section(name: str) -> Iterator[None]:
    """Assign the entries recorded in this context to the section `name`."""
    book = _BOOK.get()
    if book is None:
        yield
        return
    before, book.section = book.section, name
    try:
        yield
    finally:
        book.section = before


@contextmanager
def unrecorded() -> Iterator[None]:
    """Record nothing in this context, so that many layouts or ranks can be computed at once."""
    token = _BOOK.set(None)
    try:
        yield
    finally:
        _BOOK.reset(token)


def recording() -> bool:
    """Return whether entries are recorded: a check before computing expensive inputs of a note."""
    return _BOOK.get() is not None


def note(
    what: str, formula: str, value: ArrayLike, unit: str = "s", source: str = "", at: str = "", /, **inputs: ArrayLike
) -> None:
    """Record an entry in the current section, or in section `at`, with the `inputs` whose names are in `formula`."""
    book = _BOOK.get()
    if book is None:
        return
    names = set(_NAME.findall(formula))
    given = {name: _number(number) for name, number in inputs.items() if name in names}
    entry = LedgerEntry(at or book.section, what, formula, given, _number(value), unit, source)
    if entry not in book.entries:
        book.entries.append(entry)


def total(
    what: str, terms: Mapping[str, ArrayLike], unit: str = "s", source: str = "", value: Floats | None = None
) -> Floats:
    """Return the sum of entries recorded before, given by their names; record it if a term is not 0. `value`: the sum,
    if it is computed already."""
    result = value if value is not None else sum(map(np.asarray, terms.values()), np.asarray(0.0))
    if recording():
        nonzero = identified({name: value for name, value in terms.items() if np.any(value)})
        if nonzero:
            note(what, " + ".join(nonzero), result, unit, source, **nonzero)
    return result


_OPERATORS: dict[np.ufunc, tuple[str, int, Callable[[Any, Any], Any]]] = {
    np.add: ("+", 1, operator.add),
    np.subtract: ("-", 1, operator.sub),
    np.multiply: ("*", 2, operator.mul),
    np.true_divide: ("/", 2, operator.truediv),
    np.floor_divide: ("//", 2, operator.floordiv),
    np.power: ("**", 3, operator.pow),
}
"""The sign, the precedence and the function of an operator. Python's operators are used, as in plain formulas, because
`np.power` rounds differently from `**`."""
_ATOM = 4
_FUNCTIONS = {np.maximum: "max", np.minimum: "min", np.ceil: "ceil", np.log2: "log2", np.sum: "sum", np.max: "max"}


@dataclass(frozen=True, eq=False)
class Traced(NDArrayOperatorsMixin):
    """A number or an array with the arithmetic that produced it: `text` and its `precedence`, the values of the symbols
    in it by name, and the named steps before it, in order."""

    value: Any
    text: str
    precedence: int = _ATOM
    inputs: dict[str, Any] = field(default_factory=dict)
    steps: dict[tuple[str, str], None] = field(default_factory=dict)

    @staticmethod
    def lift(value: Any) -> "Traced":
        """Return the value itself, or a number as a constant of a formula."""
        if isinstance(value, Traced):
            return value
        if isinstance(value, np.ndarray):
            raise TypeError("an array in a formula needs a name: make it a symbol of `Formulas`")
        return Traced(value, f"{float(value):.9g}" if isinstance(value, float) else str(int(value)))

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *operands: Any, **options: Any) -> "Traced":
        terms = [Traced.lift(operand) for operand in operands]
        values = [term.value for term in terms]
        inputs = reduce(operator.or_, (term.inputs for term in terms))
        steps = reduce(operator.or_, (term.steps for term in terms))
        if ufunc in _OPERATORS:
            sign, precedence, apply = _OPERATORS[ufunc]
            left, right = terms
            text = f"{left.inside(precedence + (sign == '**'))} {sign} {right.inside(precedence + (sign != '**'))}"
            return Traced(apply(*values), text, precedence, inputs, steps)
        name = _FUNCTIONS[ufunc]
        first, *others = (term.text for term in terms)
        if (
            others and terms[0].precedence == _ATOM and first.startswith(f"{name}(")
        ):  # one maximum of three, not a maximum of a maximum
            first = first.removeprefix(f"{name}(").removesuffix(")")
        return Traced(ufunc(*values), f"{name}({', '.join([first, *others])})", _ATOM, inputs, steps)

    def __array_function__(self, function: Any, types: Any, args: tuple["Traced"], options: dict[str, Any]) -> "Traced":
        value = function(self.value, **options)
        return Traced(value, f"{_FUNCTIONS[function]}({self.text})", _ATOM, self.inputs, self.steps)

    def __bool__(self) -> bool:
        raise TypeError("a formula must not depend on the values of its symbols")

    def inside(self, precedence: int) -> str:
        """Return the text as an operand of an operator, in parentheses if the operator binds more tightly."""
        return self.text if self.precedence >= precedence else f"({self.text})"


class Formulas:
    """Named numbers and arrays, and formulas over them.

    With `f = Formulas("B", T=tokens, h=model.d_model)`, `f("bytes kept", f.T * f.h)` computes and records a quantity
    in bytes, returns its value as an array, and makes it a symbol of later formulas, `f.bytes_kept`. A mapping of
    symbols may have names of quantities, with spaces and commas.
    """

    def __init__(self, unit: str = "s", symbols: Mapping[str, ArrayLike] | None = None, /, **more: ArrayLike) -> None:
        self._unit, self._records = unit, recording()
        self.add(symbols or {}, **more)

    def add(self, symbols: Mapping[str, ArrayLike] | None = None, /, **more: ArrayLike) -> None:
        """Add symbols."""
        named: dict[str, Any] = identified(symbols or {}) | more
        if self._records:
            named = {name: Traced(value, name, inputs={name: value}) for name, value in named.items()}
        self.__dict__.update(named)

    def __getattr__(self, name: str) -> Floats:
        symbols = [symbol for symbol in vars(self) if not symbol.startswith("_")]
        raise AttributeError(f"no symbol {name!r}; there are {', '.join(symbols)}")

    def __getitem__(self, name: str) -> Floats:
        """Return the symbol for the name of a quantity."""
        symbol: Floats = getattr(self, identifier(name))
        return symbol

    def __call__(
        self, what: str, formula: ArrayLike | Traced, source: str = "", *, unit: str | None = None, at: str = ""
    ) -> Floats:
        """Record a quantity in the current section, or in section `at`, and return its value."""
        name = identifier(what)
        if not self._records:
            result = np.asarray(formula)
            self.__dict__[name] = result
            return result
        traced = Traced.lift(formula)
        result = np.asarray(traced.value)
        text = "; ".join([*(f"{step} = {text}" for step, text in traced.steps), traced.text])
        order = {symbol: place for place, symbol in enumerate(vars(self))}
        inputs = {symbol: traced.inputs[symbol] for symbol in sorted(traced.inputs, key=order.__getitem__)}
        note(what, text, result, self._unit if unit is None else unit, source, at, **inputs)
        self.add({name: result})
        return result

    def let(self, name: str, step: Floats) -> Floats:
        """Name a part of a formula, as a step before the formula."""
        if not isinstance(step, Traced):
            return step
        named: Any = replace(step, text=name, precedence=_ATOM, steps={**step.steps, (name, step.text): None})
        return named

    def constant(self, value: float) -> Floats:
        """Return a number that is shown as a factor of its own in a product of numbers."""
        constant: Any = Traced.lift(value) if self._records else value
        return constant

    def choose(self, what: str, which: Ints, formulas: Sequence[Floats], source: str = "") -> Floats:
        """Return, for each candidate, the formula whose index is in `which`."""
        used = np.unique(which)
        if len(used) == 1:
            return self(what, formulas[int(used[0])], source)
        return self(what, np.select([which == at for at in used], [formulas[at] for at in used]), source)


def plus(*terms: Floats) -> Floats:
    """Return the sum of some terms of a formula."""
    return reduce(operator.add, terms)


def greatest(*terms: Floats) -> Floats:
    """Return the largest of some terms of a formula, by element."""
    return reduce(np.maximum, terms)


@cache
def identifier(what: str) -> str:
    """Return the name of an entry in the formulas of other entries."""
    return re.sub(r"\W+", "_", what).strip("_")


def identified(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by the `identifier` of their names. Of names with one identifier, such as `shared.gate` and
    `shared_gate`, the second gets the suffix `_2`, the third `_3`, so that each stays a term of its own."""
    result: dict[str, Any] = {}
    for name, value in named.items():
        symbol, count = identifier(name), 1
        while symbol in result:
            count += 1
            symbol = f"{identifier(name)}_{count}"
        result[symbol] = value
    return result


def _number(value: ArrayLike) -> Number:
    """Return the element of an array of length 1; of an array (n, R, k, v) the elements of its v stages."""
    array = np.asarray(value, dtype=np.float64)
    if array.ndim == 4:
        array = array[0, 0, 0]
        return tuple(array.tolist())
    assert array.size == 1, f"one layout at a time is recorded, not {array.shape}"
    return float(array.reshape(-1)[0])


def substituted(formula: str, numbers: Mapping[str, str]) -> str:
    """Return a formula with its symbols replaced by numbers."""
    return _NAME.sub(lambda name: numbers.get(name[0], name[0]), formula)


_SYMBOLS = (
    ("s", "tokens", "a sequence"),
    ("product_bytes rope_fraction", "", "bytes that a product with a number moves for an element of 16 bits; part of "
     "a head that is rotated"),
    ("kept_share", "", "of the keys of a request that layers with and without windows keep, on average"),
    ("state_bytes linear_layers", "B", "of a request in one linear layer; number of linear layers of a stage"),
    ("length", "tokens", "in the cache of a request"),
    ("window attended_tokens", "tokens", "of a layer's attention; length of a sequence with as many scores without it"),
    ("T_read", "tokens", "of which a matmul keeps its input: T where it is kept as gathered over tp, else T_shard"),
    ("global_batch micro_batch", "sequences", "of a step over all ranks; of a microbatch"),
    ("tp cp ep dp_shard dp_replicate", "ranks", "degrees of the layout"),
    ("token_shards", "", "parts of a sequence between matmuls: tp with sequence parallelism, else 1"),
    ("accelerators nodes", "", "of the cluster"),
    ("h heads kv_heads c qk_dim", "", "d_model; heads of queries, of keys; width of a head of values, of keys"),
    ("kernel_width", "", "width of a head in the attention kernel, with its padding"),
    ("V vocabulary_rows", "", "vocabulary; its rows on a rank"),
    ("n_layers layers n_experts top_k", "", "layers of the model with its MTP modules, of a rank; experts of a layer, "
     "of a token"),
    ("sent_elements sent_calls", "", "parameters or gradients of a collective in a step; its messages"),
    ("busiest_load", "", "load of the busiest rank of experts, as a multiple of the mean load"),
    ("moved_experts own_experts expert_layers placed_every all_states_bytes", "", "experts of a layer that a rank "
     "sends, and has; layers of the rank; steps between placements; bytes of a weight with its averages and states"),
    ("predictions", "", "tokens that are predicted at a position: one, and one by each MTP module"),
    ("inner expert_inner", "", "features between the matmuls of networks for all tokens, of an expert"),
    ("norms branches inputs", "", "of a layer: norms, results added to the residual stream, tensors that matmuls read"),
    ("normed_inputs", "", "of these tensors the outputs of norms, not the residual stream itself"),
    ("N_matmul N_frozen N_last", "", "elements of the matrices that a token is multiplied by; of these, without "
     "gradients; of the last of layers, which full recomputation leaves out"),
    ("column kv_column row replicated per_head vocabulary", "", "parameters of a layer, by how tp splits them"),
    ("expert_elements ends largest_layer largest_matmul head", "", "parameters: of all experts of a layer; outside the "
     "layers; of the largest layer, of the largest matmul of a network, of the head, on a rank"),
    ("e e_input e_norm", "B", "of an element; of an element of a matmul's kept input, of a norm's"),
    ("widened", "", "features of queries and keys whose norms keep their inputs in fp32"),
    ("M K N batch", "", "a matmul multiplies (M, K) by (K, N), batch times"),
    ("w0 k0", "", "waves that a matmul takes longer than its tiles; features in at which half of the rate is reached"),
    ("multiprocessors occupied", "", "of the accelerator; of these, while messages over tp are reduced on them"),
    ("peak_rate rate wide_rate element_rate", "FLOP/s, B/s", "of the data sheet; what matmuls reach, in fp32; what "
     "element-wise kernels reach"),
    ("bandwidth", "B/s", "of the accelerator's memory"),
    ("matmul_share lasting_share copy_share kernel_share", "", "of the peak: the best seen, what lasts in training"),
    ("edge", "tokens", "fused attention: mean scores of a query that a block on the diagonal computes beside the half"),
    ("flash_share flash_gain c0 s0", "", "fused attention: share of the rate; of newer kernels; width, length for it"),
    ("format_rate matmul_gain", "", "of matmuls: of a format's kernels; of a stack's relative to PyTorch's"),
    ("calls", "", "messages one after another"),
    ("bytes_sent sent", "B", "of a tensor whose tokens are sent over tp; 1 if its tokens are sharded"),
    ("in_step", "", "measured time of messages in a step, relative to the same alone"),
    ("relative", "", "measured time of this kind of message, relative to the formula of all kinds"),
    ("norm_bytes residual_bytes dropout_bytes heads_bytes rope_bytes activation_bytes permute_bytes loss_bytes "
     "merge_bytes cast_bytes sum_bytes copied_bytes score_bytes score_bytes_I", "B", "moved for each element; "
     "cost/speed.py"),
    ("elements", "", "of inputs of matmuls"),
    ("S n g k", "B", "bytes of a message's buffer, ranks of its group, of them in one node, nodes of the group"),
    ("start_s latency_in_s latency_across_s message_s", "s", "of a collective, a message in a node, across, a stage's"),
    ("half_in half_across", "B", "message size at which half of the bandwidth is reached"),
    ("bandwidth_in bandwidth_across switch", "B/s", "of an accelerator in its node, across nodes, of the switches"),
    ("interference least_s", "s", "share by which a hidden message slows work; the least that is not hidden"),
    ("usual_s own_s", "s", "time of messages on the accelerator's usual network, and on its own"),
    ("windows windows_of_F windows_of_I_and_W chunks", "", "passes that messages of a step overlap with, where a rank "
     "has several stages (cost/pipeline.py); these stages"),
    ("launch_s kernels launch_backward again", "s",
     "to start a plain layer's kernels; for each of its; backward for each forward; 1 where F runs again"),
    ("flash_backward head_launches", "", "relative to F: attention's backward pass; relative to a layer's: launches of "
     "embedding, head and loss"),
    ("bucket_s", "s", "to gather or reduce the parameters of a message, beyond the collective"),
    ("parts_of_tensors part_s", ", s", "of all ranks, of each tensor; to copy one to its place"),
    ("straggler_share", "", "by which a step is longer for each doubling of nodes"),
    ("stages", "", "of the rank"),
    ("step_s optimizer_bytes", "s, B", "once a step; moved for each parameter"),
    ("hidden H owners expert_owners", "", "elements of hidden matrices on a rank of tp; ranks that share updates"),
    ("flops expert_flops matrix_bytes", "FLOP, B", "of the update of an element of a matrix; of its optimizer states"),
    ("matmul_rate over_zero over_tp", "FLOP/s, s", "of matmuls; a way of shards to their owners"),
    ("square", "FLOP", "of attention forward, all layers"),
    ("n_bytes gradient_bytes reduced_bytes weight_gradient_bytes fp8_weight_bytes", "B", "a parameter; cost/stack.py"),
    ("Q", "", "parameters in experts on a rank"),
    ("A A_in_experts", "", "trained parameters of adapters on a rank; of these, in experts"),
    ("P_stored Q_stored", "", "P and Q with quantised matrices as the elements of e bytes that take as many bytes"),
    ("decoded_bytes", "B", "that the kernels which decode quantised matrices read and write in a pass"),
    ("largest_matrix", "", "elements of a layer's largest quantised matrix on a rank"),
    ("keeps_base", "", "1 where the weights are shards of the frozen base, as with ZeRO-3 in 16 bits"),
    ("inner_read ranks_of_adapters outputs_of_adapters", "", "inner features that an adapter reads; for each token "
     "the sum of the ranks of a layer's adapters, and of the features that they add to"),
    ("outputs_scaled results_scaled row_bytes", ", , B", "for each token the sum of the outputs that DoRA scales on a "
     "rank, of column-parallel matrices and of others; read to compute the norms of their rows"),
    ("inputs_of_adapters dropped_bytes", ", B", "for each token the sum of the features that a layer's adapters read; "
     "moved to drop each"),
    ("reads_rows reads_inner", "", "1 where a trained matrix of experts reads their rows; where one reads their inner "
     "features"),
    ("ranks expert_ranks", "", "over which ZeRO shards it, 1 where each has all; the same of experts"),
    ("beside experts_beside", "", "1 where shards of weights stand beside what is gathered from them; of experts"),
    ("kept_weights gathers gathers_all messages", "", "1 where weights are kept, where layers are gathered, where a "
     "stage is; messages that have buffers"),
    ("always always_two", "", "1 where gradients have memory for the whole step, where two layers are gathered in it"),
    ("pools_of_the_step pools_at_once pools_in_passing", "B", "of the allocator's pools: for the whole step; the most "
     "that comes and goes; of parameters and gradients on their way; cost/pools.py"),
    ("fragmentation", "", "what the allocator reserves beyond live tensors, as a share"),
    ("in_flight waiting", "microbatches", "of each stage of the rank: in flight; between I and W"),
    ("accumulating reduced", "", "1 for each stage of the rank with gradients of some microbatches; of all"),
    ("all_of_stages reduced_of_stages gathered_of_stages of_embedding", "B", "for each stage of the rank: gradients "
     "while they accumulate, and when they are complete; gathered layers; the embedding's gradient"),
    ("kept kept_for_W experts_kept logits_kept logits_for_W gradients_of_stages working_of_stages", "B",
     "of a microbatch, for each stage of the rank"),
    ("rows_together keys_together sequences_together", "tokens, tokens, ", "whose scores are in memory together"),
    ("head_shards", "", "parts of the query heads, of which a rank computes one"),
    ("softmax_apart unfused_bytes unfused_bytes_I", ", B, B", "1 if the softmax of stored scores is several kernels; "
     "moved for each score beyond the fused one, forward and backward"),
    ("row_score_bytes row_score_bytes_I row_flops_I", "B, B, ", "moved for each score that is in memory, forward, "
     "backward; FLOPs of the backward pass of attention, relative to F"),
    ("scanned scan_numel", "", "elements a token of a scan of linear attention, with gradients on a rank; in one pass"),
    ("scan_flops map_flops", "FLOP", "of a token in the scans of linear attention, forward; in its maps of states"),
    ("over_cp", "", "1 where ranks of cp share a sequence"),
    ("kept_maps gathered_maps", "B", "of linear attention over cp: states, maps and tails kept; maps of all pieces"),
    ("q k v out narrow", "", "features of queries, keys, values, results on a rank; of latent attention's vectors"),
    ("made tensors", "", "tensors of inner width that a network keeps beside its last input; that its backward needs"),
    ("narrow_norms rotated keys_and_values padded_out", "", "features that recomputation need not keep: normed latent "
     "vectors; placed queries and keys; keys and values from latent vectors; padded results, or repeated kv heads"),
    ("placed_keys", "", "features of keys that no kernel keeps, because it keeps repeated ones"),
    ("eager_gate", "", "1 where experts keep silu(gate) although other networks are compiled and do not"),
    ("untied_head", "B", "gradient of a head that is not tied, until the embedding has its own"),
    ("scattered gradients_summed", "", "1 where tokens are sharded over tp; then gradients of the head's input"),
    ("first_pass alone tied_head", "", "1 where a step has one microbatch and no gradients before; where one rank has "
     "no FSDP; elements of the head, if it is the embedding"),
    ("gated_outputs", "", "outputs of shared experts that a gate multiplies"),
    ("copied_alone", "", "1 where only a copy in fp32 of a router's input is kept"),
    ("cut visiting expanded", "", "1 where tokens are gathered over tp; keys and values of other ranks of cp, for each "
     "own; those with all query heads, and their gradients"),
    ("kept_by_a_block working_of_a_block several", "B", "what the backward pass of a block frees; its temporary "
     "buffers; 1 where a stage has several blocks"),
    ("mask weighed unweighted copied exchanged keeps_outputs", "", "1 where kept: masks, experts' results, their "
     "inputs without weight, the router's input in fp32, results of all-to-alls, what a stage sends"),
    ("receives_ahead frees_inputs", "", "1 where the input of a stage is in a buffer for messages; where that of a "
     "network's last matmul is freed before all gradients of the network exist"),
    ("padding rows_of_experts", "B", "heads made as wide as a kernel wants, or normed; rows sent to experts"),
    ("logit_bytes loss_bytes_a_logit", "B", "of a logit, kept; in the loss on top"),
    ("logits_together loss_buffers", "", "logits that the loss takes at a time; its buffers in fp32 of them: 2 where "
     "it is compiled, else 1 in 16 bits"),
    ("loss logits_of_a_microbatch", "B", "in the loss on top of logits, or gradient of the head's matrix if that is "
     "larger; what the last stage keeps for its loss"),
    ("compressed left_rows right_columns r moved_bytes", "B", "of matrices whose gradients are compressed with error "
     "feedback: elements; with products of rank r rows and columns; moved for each element"),
    ("arrived chosen_bytes arrived_bytes", "B", "largest elements of gradients from all ranks; moved for each element "
     "they are chosen from, and for each that arrives"),
    ("states element coded scales expert_coded expert_scales", "B", "optimizer states; bytes of a number; elements of "
     "states of a byte, their scales, of a state; of experts"),
    ("C sum_bytes", "tokens, B", "a chunk of the loss; of an element of the sum of gradients over chunks"),
)  # fmt: skip

NOTATION = {name: (unit, meaning, names) for names, unit, meaning in _SYMBOLS for name in names.split()}
"""For each symbol its unit, its meaning, and the symbols that are explained together with it."""
