"""Bugs of activations in the memory of the host: what comes back late, as something else, or from another place."""

from dataclasses import replace

from tests.mutation import Mutation
from tests.training.bugs.bug import ONE, PP, SP, AnyBug, Bug, UnitBug

_STORE = "shardwright.parallel.offload:ActivationsOnHost"
_TESTS = "tests/training/test_offload_activations.py:"
_IN_PLACE = _TESTS + "test_a_tensor_that_is_changed_in_place_comes_back_as_it_was_when_it_was_saved"
_TWO = _TESTS + "test_the_device_has_the_activations_of_two_layers_at_a_time"
_ONE, _PP, _SP = (replace(layout, offload_activations="cpu") for layout in (ONE, PP, SP))
_PARTS = replace(_ONE, recompute="selective")

SHARD: dict[str, AnyBug] = {
    "activations come back as the beginning of what their storage held": UnitBug(
        Mutation(
            "shardwright.parallel.offload:OffloadedView.read",
            "copy.on_device.view(self.dtype).as_strided(*self.view)",
            "copy.on_device.view(self.dtype).as_strided(*self.view[:2], 0)",
        ),
        _TESTS + "test_a_view_comes_back_as_the_view_that_was_saved",
    ),
    "the input of a stage goes to the host, which the pipeline keeps anyway": UnitBug(
        Mutation(
            f"{_STORE}.keep", "number in self._inputs or number in layer.parameters()", "number in layer.parameters()"
        ),
        _TESTS + "test_small_tensors_and_the_input_of_a_stage_stay",
    ),
}
DTYPE: dict[str, AnyBug] = {
    "activations are rounded to bf16 on the host": Bug(
        Mutation(
            f"{_STORE}.copy_out",
            "on_host.copy_(on_device, non_blocking=True)",
            "on_host.copy_(on_device.bfloat16() if on_device.is_floating_point() else on_device, non_blocking=True)",
        ),
        [_PP],
    ),
}
STALE: dict[str, AnyBug] = {
    "activations that were changed in place are not copied again": UnitBug(
        Mutation(f"{_STORE}.keep", "copy is None or copy.version != tensor_version(x)", "copy is None"), _IN_PLACE
    ),
    "what is still on the device is read though it was changed in place": UnitBug(
        Mutation("shardwright.parallel.offload:_LayerPass.to_come", "copy.has_to_come", "copy.on_device is None"),
        _IN_PLACE,
    ),
    "activations of the layer before do not come while a layer runs backwards": UnitBug(
        Mutation(f"{_STORE}.bring", "(layer, layer.before)", "(layer, layer)"), _TWO
    ),
    "the device never lets go of activations that are on the host": UnitBug(
        Mutation(f"{_STORE}._let_go", "copy.on_device = None", "pass"), _TWO
    ),
    "activations come back a place further": Bug(
        Mutation(
            f"{_STORE}.copy_in",
            "on_device.copy_(on_host, non_blocking=True)",
            "on_device.copy_(on_host.roll(1), non_blocking=True)",
        ),
        [_PARTS, _SP],
    ),
}
