"""What one process of several does in the tests of sequence-sharded prefill: `python sharded.py OUTPUT MODEL…`."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from modeling_attnres import sequence_sharded_plan
from modeling_attnres.depth_readers import TwoPhaseReader


LENGTHS = {"divides": 24, "does not": 23, "leaves one of four ranks without": 9, "a token": 1}


def load(folder: str | Path, **how):
    """In float64, which the eager experts alone take."""
    how = {"dtype": torch.float64, "experts_implementation": "eager"} | how
    return AutoModelForCausalLM.from_pretrained(folder, **how).eval()


def prompts(length: int) -> dict[str, torch.Tensor]:
    """Two rows, of which one begins with padding."""
    ids = torch.randint(3, 90, (2, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[1, : length // 3] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def observe(model) -> dict:
    """What a model computes: logits at three lengths, depth weights, greedy text, prefill in pieces."""
    found = {name: model(**prompts(length), use_cache=False).logits for name, length in LENGTHS.items()}
    outputs = model(**prompts(23), use_cache=False, output_depth_attentions=True)
    found |= {"with weights": outputs.logits, "weights": list(outputs.depth_attentions)}
    how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    found["text"] = model.generate(**prompts(23), **how)
    found["text of pieces"] = model.generate(**prompts(23), **how, prefill_chunk_size=8)
    # A layer that adds nothing, as hooks make it: the first, which is given the whole embedding
    hook = model.model.layers[0].register_forward_hook(lambda module, args, output: args[0])
    found["first layer skipped"] = model(**prompts(23), use_cache=False).logits
    hook.remove()
    return found


def block_bytes(model, length: int) -> int:
    """Count what the reader of a pass holds of closed blocks."""
    sizes = []
    append = TwoPhaseReader.append

    def append_and_count(self, block_BTD):
        append(self, block_BTD)
        sizes.append(self._values_NMD.nbytes + self._logits_NMS.nbytes)

    TwoPhaseReader.append = append_and_count
    try:
        with torch.no_grad():
            model(torch.ones(1, length, dtype=torch.long), use_cache=False)
    finally:
        TwoPhaseReader.append = append
    return max(sizes)


def load_sharded(folder: str):
    plan = sequence_sharded_plan(AutoConfig.from_pretrained(folder))
    how = DistributedConfig(tp_size=dist.get_world_size(), tp_plan=plan)
    return load(folder, distributed_config=how)


def decode_without_head(folder: str) -> torch.Tensor:
    """The last hidden state of a decoder that is loaded alone."""
    plan = sequence_sharded_plan(AutoConfig.from_pretrained(folder), prefix="")
    how = DistributedConfig(tp_size=dist.get_world_size(), tp_plan=plan)
    model = AutoModel.from_pretrained(folder, dtype=torch.float64, distributed_config=how).eval()
    with torch.no_grad():
        return model(**prompts(23), use_cache=False).last_hidden_state


def main(output: str, *folders: str) -> None:
    dist.init_process_group("gloo")
    results = []
    for folder in folders:
        model = load_sharded(folder)
        found = observe(model) | {"bytes": block_bytes(model, 24)}
        outputs = model(**prompts(23), use_cache=False)  # with gradients: whole on every rank
        found["with gradients"] = outputs.logits.detach()
        results.append(found)
    results[0]["without head"] = decode_without_head(folders[0])
    if dist.get_rank() == 0:
        torch.save(results, Path(output))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
