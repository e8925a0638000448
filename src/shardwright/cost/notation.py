"""The symbols of the ledger's formulas, with their units. Other names in a formula are names of entries."""

_SYMBOLS = (
    ("s", "tokens", "a sequence"),
    ("T_read", "tokens", "of which a matmul keeps its input: T where it is kept as gathered over tp, else T_shard"),
    ("global_batch micro_batch", "sequences", "of a step over all ranks; of a microbatch"),
    ("tp cp ep dp_shard dp_replicate", "ranks", "degrees of the layout"),
    ("token_shards", "", "parts of a sequence between matmuls: tp with sequence parallelism, else 1"),
    ("accelerators nodes", "", "of the cluster"),
    ("h heads kv_heads c qk_dim", "", "d_model; heads of queries, of keys; width of a head of values, of keys"),
    ("V vocabulary_rows", "", "vocabulary; its rows on a rank"),
    ("n_layers layers n_experts top_k", "", "layers of the model with its MTP modules, of a rank; experts of a layer, "
     "of a token"),
    ("predictions", "", "tokens that are predicted at a position: one, and one by each MTP module"),
    ("inner expert_inner", "", "features between the matmuls of networks for all tokens, of an expert"),
    ("norms branches inputs", "", "of a layer: norms, results added to the residual stream, tensors that matmuls read"),
    ("N_matmul N_last", "", "elements of the matrices that a token is multiplied by; of the last of layers, which full "
     "recomputation leaves out"),
    ("column kv_column row replicated per_head vocabulary", "", "parameters of a layer, by how tp splits them"),
    ("expert_elements ends largest_layer largest_matmul head", "", "parameters: of all experts of a layer; outside the "
     "layers; of the largest layer, of the largest matmul of a network, of the head, on a rank"),
    ("e e_input", "B", "of an element; of an element of a matmul's kept input"),
    ("M K N batch", "", "a matmul multiplies (M, K) by (K, N), batch times"),
    ("w0 k0", "", "waves that a matmul takes longer than its tiles; features in at which half of the rate is reached"),
    ("multiprocessors", "", "of the accelerator"),
    ("peak_rate rate element_rate", "FLOP/s, B/s", "of the data sheet; what matmuls, element-wise kernels reach"),
    ("bandwidth", "B/s", "of the accelerator's memory"),
    ("matmul_share lasting_share copy_share kernel_share", "", "of the peak: the best seen, what lasts in training"),
    ("flash_share flash_gain c0 s0", "", "fused attention: share of the rate; of newer kernels; width, length for it"),
    ("format_rate matmul_gain", "", "of matmuls: of a format's kernels; of a stack's relative to PyTorch's"),
    ("calls", "", "messages one after another"),
    ("in_step", "", "measured time of messages in a step, relative to the same alone"),
    ("relative", "", "measured time of this kind of message, relative to the formula of all kinds"),
    ("norm_bytes residual_bytes dropout_bytes heads_bytes rope_bytes activation_bytes permute_bytes loss_bytes "
     "merge_bytes cast_bytes sum_bytes score_bytes score_bytes_I", "B", "moved for each element; cost/speed.py"),
    ("elements", "", "of inputs of matmuls"),
    ("S n g k", "B", "bytes of a message's buffer, ranks of its group, of them in one node, nodes of the group"),
    ("start_s latency_in_s latency_across_s message_s", "s", "of a collective, a message in a node, across, a stage's"),
    ("half_in half_across", "B", "message size at which half of the bandwidth is reached"),
    ("bandwidth_in bandwidth_across switch", "B/s", "of an accelerator in its node, across nodes, of the switches"),
    ("interference least_s", "s", "share by which a hidden message slows work; the least that is not hidden"),
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
    ("q k v out narrow", "", "features of queries, keys, values, results on a rank; of latent attention's vectors"),
    ("made tensors", "", "tensors of inner width that a network keeps beside its last input; that its backward needs"),
    ("narrow_norms rotated keys_and_values padded_out", "", "features that recomputation need not keep: normed latent "
     "vectors; placed queries and keys; keys and values from latent vectors; padded results"),
    ("eager_gate", "", "1 where experts keep silu(gate) although other networks are compiled and do not"),
    ("first_pass tied_head", "", "1 where a step has one microbatch; elements of the head, if it is the embedding"),
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
    ("factored left_rows right_columns r moved_bytes", "B", "of matrices whose gradients travel as products of rank r: "
     "elements, rows, columns; moved for each element"),
    ("states element coded scales expert_coded expert_scales", "B", "optimizer states; bytes of a number; elements of "
     "states of a byte, their scales, of a state; of experts"),
    ("C sum_bytes", "tokens, B", "a chunk of the loss; of an element of the sum of gradients over chunks"),
)  # fmt: skip

NOTATION = {name: (unit, meaning, names) for names, unit, meaning in _SYMBOLS for name in names.split()}
"""For each symbol its unit, its meaning, and the symbols that are explained together with it."""
