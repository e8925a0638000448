"""Bugs of streams of a GPU: a copy that does not wait for what it reads, or is not waited for."""

from tests.mutation import Mutation
from tests.training.bugs.bug import AnyBug, UnitBug

_TESTS = "tests/training/test_streams.py"
_SNAPSHOT, _GUARD = (
    "shardwright.training.checkpoint.saver:Snapshot",
    "shardwright.training.resilience.spikes:SpikeGuard",
)
_LINK, _ACTIVATIONS = "shardwright.training.offload.on_host:HostLink", "shardwright.parallel.offload:ActivationsOnHost"


def _bug(test: str, room: str, method: str, before: str, after: str = "pass", *given: str) -> UnitBug:
    return UnitBug(Mutation(f"{room}.{method}", before, after), f"{_TESTS}:{test}", given)


def _snapshot_bug(method: str, before: str, after: str = "pass") -> UnitBug:
    return _bug("check_snapshot", _SNAPSHOT, method, before, after, "model/w")


def _guard_bug(method: str, before: str, after: str = "pass") -> UnitBug:
    test = "test_a_step_is_judged_by_its_own_loss_and_norm_while_the_device_clips"
    return _bug(test, _GUARD, method, before, after)


def _link_bug(method: str, before: str, after: str = "pass") -> UnitBug:
    test = "test_an_update_on_the_host_waits_for_gradients_and_the_next_pass_for_the_weights"
    return _bug(test, _LINK, method, before, after)


def _activations_bug(method: str, before: str, after: str = "pass") -> UnitBug:
    test = "test_activations_go_to_the_host_and_come_back_before_they_are_read"
    return _bug(test, _ACTIVATIONS, method, before, after)


STALE: dict[str, AnyBug] = {
    "the copy for a checkpoint does not wait for the step before it": _snapshot_bug(
        "make", "self._stream.wait_event(self._ready)"
    ),
    "a checkpoint is written before its copy is there": _snapshot_bug("make", "self._stream.synchronize()"),
    "the copy for a checkpoint waits for the copy before it and not for training": _snapshot_bug(
        "begin", "self._ready.record(torch.cuda.current_stream(self._device))", "self._ready.record(self._stream)"
    ),
    "the copy for a checkpoint is on the stream of training": _snapshot_bug(
        "make", "torch.cuda.stream(self._stream)", "nullcontext()"
    ),
    "a checkpoint waits for all that the device has to do": _snapshot_bug(
        "make", "self._stream.wait_event(self._ready)", "self._stream.wait_stream(torch.cuda.default_stream())"
    ),
    "a step is judged before its numbers have arrived": _guard_bug("takes", "self._ready()"),
    "the numbers that a step is judged by are copied before they are summed": _guard_bug("start", "work.wait()"),
    "memory of the numbers that a step is judged by is used again before they are copied": _guard_bug(
        "start", "sums.record_stream(self._stream)"
    ),
    "a step is judged when its gradients are clipped": _guard_bug(
        "takes", "self._ready()", "torch.cuda.current_stream().synchronize()"
    ),
    "gradients go to the host before they are computed": _link_bug(
        "start", "stream.wait_stream(torch.cuda.current_stream(stream.device))"
    ),
    "the update on the host reads gradients that are on their way": _link_bug(
        "fetch", "self._down.record_event().synchronize", "self._down.record_event"
    ),
    "a forward pass does not wait for weights from the host": _link_bug(
        "join", "torch.cuda.current_stream(self._up.device).wait_stream(self._up)"
    ),
    "activations go to the host before they are computed": _activations_bug(
        "_copied", "self._down.wait_stream(torch.cuda.current_stream(self.device))"
    ),
    "memory of activations is used again before they are on the host": _activations_bug(
        "_let_go", "self._wait(self._down)"
    ),
    "activations come back into memory that is still in use": _activations_bug(
        "bring", "self._up.wait_stream(torch.cuda.current_stream(self.device))"
    ),
    "activations are read before they are back": UnitBug(
        Mutation(
            "shardwright.parallel.offload:OffloadedView.read",
            "torch.cuda.current_stream(store.device).wait_event(copy.arrived)",
            "pass",
        ),
        f"{_TESTS}:test_activations_go_to_the_host_and_come_back_before_they_are_read",
    ),
}
