from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

import shardwright
from shardwright.system import torch_private
from shardwright.system.torch_private import parameter_groups, whole_parameter
from tests.distributed import run_ranks
from tests.private_names import missing, own_names, parsed, private_uses, uses_of_private_classes

PACKAGE = Path(shardwright.__file__).parent
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
MODULE = PACKAGE / "system/torch_private.py"
OF_OTHERS = {"accelerate_deepspeed.py": "_reset_state", "torchtitan_cpu.py": "_grouped_mm"}
"""By file, a private name of a library that the file adapts."""
OF_GROUP = ("fsdp_params", "reduce_grads", "post_backward", "post_forward_mesh_info", "unshard", "is_unsharded")
OF_PARAMETER = (
    *("sharded_param", "sharded_state", "padded_sharded_param_size", "offload_to_cpu", "all_gather_outputs"),
    *("unsharded_param", "unsharded_accumulated_grad", "accumulate_unsharded_grad_if_needed"),
    *("to_accumulated_grad_if_needed", "to_sharded_post_forward", "to_sharded_dtensor", "free_unsharded_param"),
)
"""Attributes of objects whose classes are private."""


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._foreach_norm([])",
        "import torch.distributed as dist\ndist.distributed_c10d._world",
        "from torch._subclasses.fake_tensor import FakeTensor",
        "from torch.distributed.tensor.placement_types import _StridedShard as Strided",
        "import torch.distributed._tools.fake_collectives",
        "import torch\naten = torch.ops.aten\naten._flash_attention_forward()",
        "def version(tensor):\n    return tensor._version",
        "def state(module):\n    return getattr(module, '_fsdp_param_groups')",
        "def move(module):\n    module._apply(lambda x: x)",
        "from torch import nn\nclass Block(nn.Module):\n    def _apply(self, change):\n        pass",
    ],
)
def test_a_private_name_of_torch_is_noticed_however_it_is_used(source: str):
    assert list(private_uses(parsed(source), own=frozenset({"_apply", "_version"})))


def test_no_other_module_uses_a_private_name_of_torch():
    files = sorted([*PACKAGE.rglob("*.py"), *BENCHMARKS.rglob("*.py")])
    nodes = {file: parsed(file.read_text()) for file in files if file != MODULE}
    own = own_names(nodes.values())
    uses = [(file, use) for file in nodes for use in private_uses(nodes[file], own)]
    assert [f"{file}:{use.line}: {use.path}" for file, use in uses if use.path != OF_OTHERS.get(file.name)] == []


def test_no_other_module_uses_an_attribute_that_only_private_classes_have():
    files = {file: parsed(file.read_text()) for root in (PACKAGE, BENCHMARKS) for file in sorted(root.rglob("*.py"))}
    uses = list(uses_of_private_classes(files))
    assert {"fsdp_params", "sharded_param"} <= {use.path for file, use in uses if file == MODULE}
    assert [f"{file}:{use.line}: {use.path}" for file, use in uses if file != MODULE] == []


def lacking(source: str) -> list[str]:
    """The private names in a file that the installed PyTorch lacks, of objects as they are in a step of FSDP2."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    numbers: list[Any] = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *dy: Tensor) -> Tensor:
            numbers.append(torch_private.node_number())
            return dy[0]

    first = torch_private.next_node_number()
    y = Seen.apply(model(torch.ones(2, 4, requires_grad=True)))
    y.sum().backward()
    assert first <= numbers[0] < torch_private.next_node_number()
    assert isinstance(model, FSDPModule)
    ((group,), state) = parameter_groups(model), model._get_fsdp_state()
    (parameter,) = group.fsdp_params
    assert whole_parameter(parameter) is not None
    of_parameter = (
        "_sharded_param_data",
        "_sharded_post_forward_param_data",
        "_setattr_on_modules",
        "_unsharded_param",
    )
    owners: dict[str, Any] = dict.fromkeys(of_parameter, parameter)
    owners |= {"_get_fsdp_state": model, "_root_post_backward_final_callback": state, "_all_gather_result": group}
    owners |= {"_apply": model, "_flatten": DeviceMesh, "_version": y, "_cdata": y.untyped_storage()}
    owners |= {
        "_sequence_nr": y.grad_fn,
        "_type": torch.ScriptObject,
        "_schema": torch.ops.aten.add.Tensor,
        "_dump_fr_trace_json": torch._C._distributed_c10d,
    }
    stage = PipelineStage(nn.Linear(1, 1), 0, 1, torch.device("cpu"))
    of_schedule = ("_stage", "_has_backward", "_step_microbatches")
    owners |= dict.fromkeys(of_schedule, Schedule1F1B(stage, 1)) | {"_stages": ScheduleInterleaved1F1B([stage], 1)}
    owners["_checkpoint_wrapped_module"] = checkpoint_wrapper(nn.Linear(1, 1))
    owners["_should_skip_dynamo"] = torch_private.TorchDispatchMode
    either = [name for name in ("_fsdp_param_group", "_fsdp_param_groups") if hasattr(state, name)]
    owners |= dict.fromkeys(("_fsdp_param_group", "_fsdp_param_groups"), _Either() if either else None)
    others = [f"FSDPParamGroup.{name}" for name in OF_GROUP if not hasattr(group, name)]
    others += [f"FSDPParam.{name}" for name in OF_PARAMETER if not hasattr(parameter, name)]
    return others + missing(parsed(source), owners)


class _Either:
    """The two names of PyTorch 2.11 and of newer versions, of which a state has one."""

    _fsdp_param_group = _fsdp_param_groups = None


def test_the_installed_torch_has_every_private_name_that_the_package_uses():
    (absent,) = run_ranks(lacking, 1, MODULE.read_text())
    assert absent == [], f"torch {torch.__version__} lacks {', '.join(absent)}"


def test_each_private_name_that_the_installed_torch_lacks_is_reported_by_its_path():
    source = MODULE.read_text().replace("torch._foreach_norm", "torch._foreach_norms").replace("._cdata", "._data_of_c")
    (absent,) = run_ranks(lacking, 1, source)
    assert absent == ["_data_of_c", "torch._foreach_norms"]
