"""What one process of several does in the tests, with gloo on CPU.

`python distributed.py CASE OUTPUT MODEL…`, or `python distributed.py finetune|pretrain …`, the command with FSDP2 as on
GPUs.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from transformers import AutoModelForCausalLM

import modeling_attnres  # noqa: F401


def rows() -> torch.Tensor:
    """Four rows a step, the same in every process."""
    return torch.randint(3, 90, (3, 4, 24), generator=torch.Generator().manual_seed(0))


def train(model, share: slice) -> list[float]:
    """Three steps; gradients are averages over processes of the mean loss over their rows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # Adam makes steps of rounding errors
    losses = []
    for batch in rows():
        loss = model(input_ids=batch[share], labels=batch[share], use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.is_initialized():
            dist.all_reduce(loss, op=dist.ReduceOp.AVG if dist.get_backend() != "gloo" else dist.ReduceOp.SUM)
            loss = loss / dist.get_world_size()
        losses.append(loss.item())
    return losses


def fsdp(output: Path, folder: str) -> None:
    """FSDP2 as accelerate wraps a model, with checkpointing; a sharded checkpoint, and what one process finds in it."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True
    )
    accelerator.state.fsdp_plugin = plugin  # accelerate itself offers FSDP on accelerators only
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    model.gradient_checkpointing_enable()
    model = fsdp2_prepare_model(accelerator, model)
    kinds = sorted({type(module).__name__ for module in model.modules() if hasattr(module, "unshard")})
    share = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    losses = train(model, share)
    import torch.distributed.checkpoint as checkpoint

    checkpoint.save(get_model_state_dict(model), checkpoint_id=str(output / "sharded"))
    if dist.get_rank() == 0:
        torch.save({"losses": losses, "units": kinds}, output / "result.pt")


def tensor_parallel(output: Path, *folders: str) -> None:
    found = [logits_in_parallel(folder) for folder in folders]
    if dist.get_rank() == 0:
        torch.save(found, output / "result.pt")


def logits_in_parallel(folder: str) -> dict:
    """`tp_plan="auto"` shards the base's linear maps."""
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    with torch.no_grad():
        logits = model(torch.arange(3, 40)[None], use_cache=False).logits
    if hasattr(logits, "full_tensor"):
        logits = logits.full_tensor()
    sharded = sum(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    return {"logits": logits, "sharded": sharded}


def train_with_fsdp(command: list[str]) -> None:
    """`python -m training finetune` or `pretrain` where accelerate takes CPUs, too, for devices to shard over."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    from training import finetune, pretrain
    from training.__main__ import app

    module = {"finetune": finetune, "pretrain": pretrain}[command[0]]

    # accelerate's state is made as on accelerators, and the check that refuses FSDP on CPUs sees none
    initialise, check = AcceleratorState.__init__, module.check_arguments

    def as_on_accelerators(self, *args, fsdp_plugin=None, **kwargs):
        initialise(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    def without_refusing_cpus(recipe, arguments, *stages):
        fsdp, arguments.fsdp = arguments.fsdp, None
        config = check(recipe, arguments, *stages)
        arguments.fsdp = fsdp
        return config

    AcceleratorState.__init__, module.check_arguments = as_on_accelerators, without_refusing_cpus
    app(command)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] in ("finetune", "pretrain"):
        train_with_fsdp(sys.argv[1:])
    case, output, *folders = sys.argv[1:]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    {"fsdp": fsdp, "tp": tensor_parallel}[case](Path(output), *folders)
    dist.barrier()
    dist.destroy_process_group()
