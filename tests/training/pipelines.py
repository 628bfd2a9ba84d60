"""What one process of several does in the tests of pipelines, with gloo on CPU: `python pipelines.py CASE OUTPUT`."""

import os
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from benchmarks.pipeline import counting_sends
from common.errors import one_line_errors
from tests.families import BY_NAME
from training.pipeline import Pipeline
from training.pipeline_cut import cut_layers
from training.pipeline_files import load_part, save_weights


LAYOUTS = {
    "block": {"attn_res_block_size": 2},
    "straddling": {"attn_res_block_size": 3},
    "uneven": {"attn_res_block_boundaries": [0, 1, 4, 7]},
    "heads": {"attn_res_block_size": 2, "attn_res_heads": 4},
    "full": {"attn_res_mode": "full"},
    "none": {"attn_res_mode": "none"},
}


def make(dtype=torch.float32, layers: int = 8, **fields):
    fields = {"hidden_size": 16, "num_hidden_layers": layers, "attn_res_implementation": "training"} | fields
    return BY_NAME["Llama"].causal_lm(dtype=dtype, **fields)


def batch() -> dict[str, torch.Tensor]:
    """Rows of which some begin with padding, and some tokens are not learned."""
    ids = torch.randint(3, 90, (6, 10), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[2, 4:7] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return (torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected)).item()


def compare(model, pipeline: Pipeline, share: slice = slice(None)) -> dict[str, float]:
    """The relative errors of a step's loss, gradients (together, and the worst by itself), their norm and logits."""
    outputs = model(**batch(), use_cache=False)
    model.zero_grad()
    outputs.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        logits = model(**batch(), use_cache=False).logits
    own = {name: value[share] for name, value in batch().items()}
    pipeline.run_step(own)  # whose gradients the next step's replace
    loss = pipeline.run_step(own)
    named = {name: parameter for name, parameter in pipeline.model.named_parameters() if parameter.requires_grad}
    found = torch.cat([parameter.grad.flatten() for parameter in named.values()])
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    expected = [gradients[name if name in gradients else tied[name]] for name in named]
    errors = {
        "loss": distance(loss, outputs.loss.detach()),
        "gradient": distance(found, torch.cat([grad.flatten() for grad in expected])),
        "worst gradient": max(
            distance(p.grad, grad) for p, grad in zip(named.values(), expected, strict=True) if grad.any()
        ),
        "norm": distance(pipeline.gradient_norm(), torch.nn.utils.get_total_norm(gradients.values())),
    }
    evaluated, own_logits = pipeline.evaluate(own)
    errors["evaluated loss"] = distance(evaluated, outputs.loss.detach())
    errors["logits"] = 0.0 if own_logits is None else distance(own_logits, logits[share])
    return errors


def equal(output: Path) -> None:
    """Every layout, with one and two virtual stages; numbers of microbatches that divide rows and ranks, or do not."""
    dtype = getattr(torch, os.environ["DTYPE"])
    settings = [(1, "1f1b", 5), (2, "1f1b", 3), (2, "gpipe", 4), (2, "1f1b", 7)]
    found = {}
    for name, fields in LAYOUTS.items():
        for virtual, schedule, microbatches in settings:
            caching = microbatches != 3
            model = make(dtype, **fields)
            how = {"virtual": virtual, "schedule": schedule, "microbatches": microbatches, "caching": caching}
            found[name, *how.values()] = compare(model, Pipeline(make(dtype, **fields), **how))
    save(found, output)


def tied(output: Path) -> None:
    """A head that is the embedding, too, on other ranks than it."""
    fields = {"tie_word_embeddings": True, "attn_res_block_size": 3}
    save({"tied": compare(make(**fields), Pipeline(make(**fields), virtual=2, microbatches=2))}, output)


def frozen(output: Path) -> None:
    """All but two layers are frozen, so that the first stage has nothing to learn, and the gradient ends after it."""
    found = {}
    for reentrant in (None, False, True):
        model, whole = (make(attn_res_block_size=3) for _ in range(2))
        for one in (model, whole):
            one.requires_grad_(False)
            for layer in (5, 7):
                one.model.layers[layer].requires_grad_(True)
        pipeline = Pipeline(whole, virtual=2, microbatches=3)
        if reentrant is not None:
            pipeline.model.activation_checkpointing_enable({"use_reentrant": reentrant})
        found["frozen", reentrant] = compare(model, pipeline)
    save(found, output)


def families(output: Path) -> None:
    """Mixtures of experts and linear attention, for which microbatches alone change more than 1e-6."""
    found = {}
    for name in ("Mixtral", "DeepseekV3", "KimiLinear"):
        model, whole = (BY_NAME[name].causal_lm(attn_res_block_size=2) for _ in range(2))
        learned = (batch()["labels"][:, 1:] != -100).sum()
        for first in (0, 2, 4):
            own = {key: value[first : first + 2] for key, value in batch().items()}
            labels = own.pop("labels")
            how = {"labels": labels, "vocab_size": model.config.vocab_size, "num_items_in_batch": learned}
            model.loss_function(logits=model(**own, use_cache=False).logits, **how).backward()
        expected = dict(model.named_parameters())
        pipeline = Pipeline(whole, virtual=2, microbatches=3)
        pipeline.run_step(batch())
        pairs = [(p.grad.flatten(), expected[key].grad) for key, p in pipeline.model.named_parameters()]
        pairs = [(grad, other.flatten()) for grad, other in pairs if other is not None]
        found[name] = {"gradient": distance(*map(torch.cat, zip(*pairs, strict=True)))}
    save(found, output)


def replicas(output: Path) -> None:
    """Two pipelines of two ranks, each with half the rows, which do not have as many learned tokens."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    groups = {"group": mesh.get_group("pipeline"), "data_group": mesh.get_group("data")}
    model = make(attn_res_block_size=3)
    pipeline = Pipeline(make(attn_res_block_size=3), **groups, virtual=2, microbatches=3)
    first = 3 * mesh.get_local_rank("data")
    save({"replicas": compare(model, pipeline, slice(first, first + 3))}, output)


def save(found: dict, output: Path) -> None:
    """Write the largest error of any rank."""
    for errors in found.values():
        values = torch.tensor(list(errors.values()), dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        errors |= dict(zip(errors, values.tolist(), strict=True))
    if dist.get_rank() == 0:
        torch.save(found, output)


def count(output: Path) -> None:
    """What a forward pass sends, in tensors `[B, T, D]`, for 2 to 4 ranks with 1 to 4 virtual stages."""
    found = {}
    for ranks in (2, 3, 4):
        group = dist.new_group(list(range(ranks)))
        for virtual in (1, 2, 3, 4):
            for caching in (True, False):
                numbers = torch.zeros(1)
                if dist.get_rank() < ranks:
                    model = make(layers=2 * ranks * virtual, attn_res_block_size=1)
                    pipeline = Pipeline(model, group, virtual=virtual, microbatches=1, caching=caching)
                    with counting_sends() as sent:
                        pipeline.evaluate({name: value[:1] for name, value in batch().items()})
                    numbers += sum(tensor.shape == (1, 10, 16) for tensor in sent)
                dist.all_reduce(numbers)
                found[ranks, virtual, caching] = numbers.item()
    if dist.get_rank() == 0:
        torch.save(found, output)


def checkpoint(output: Path) -> None:
    """Each rank loads its layers alone, and the ranks save one model."""
    cut = cut_layers(6, dist.get_world_size(), 1, None)
    source = os.environ["MODEL"]
    part = load_part(source, cut, dist.get_rank())
    own = sum(parameter.numel() for parameter in part.parameters())
    save_weights(Pipeline(part, virtual=1, microbatches=1), output.with_name("saved"))
    sizes: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(sizes, own)
    if dist.get_rank() == 0:
        whole = AutoModelForCausalLM.from_pretrained(source)
        torch.save({"parts": sizes, "whole": sum(p.numel() for p in whole.parameters())}, output)


@contextmanager
def counting_forwards(model):
    """Collect the MLPs of layers as often as they begin; recomputation may stop before they end."""
    ran = []
    handles = [
        module.register_forward_pre_hook(lambda module, args: ran.append(module))
        for name, module in model.named_modules()
        if name.endswith(".mlp")
    ]
    yield ran
    for handle in handles:
        handle.remove()


def checkpointing(output: Path) -> None:
    """Layers recompute in the backward pass what they are asked not to keep."""
    found = {}
    for name in ("block", "straddling", "full", "none"):
        for schedule in ("1f1b", "gpipe"):
            for kwargs in (None, {"use_reentrant": False}, {"use_reentrant": True}):
                pipeline = Pipeline(make(**LAYOUTS[name]), virtual=2, microbatches=4, schedule=schedule)
                if kwargs is not None:  # as Trainer does, after the pipeline was made
                    pipeline.model.activation_checkpointing_enable(kwargs)
                errors = compare(make(**LAYOUTS[name]), pipeline)
                with counting_forwards(pipeline.model) as ran:
                    pipeline.run_step(batch())
                times = (1 if kwargs is None else 2) * pipeline.microbatches
                errors["runs"] = abs(len(ran) - times * len(pipeline.cut.layers_on(pipeline.rank)))
                found[name, schedule, None if kwargs is None else kwargs["use_reentrant"]] = errors
    save(found, output)


def lost(output: Path) -> None:
    """The last rank ends, or hangs, while the others wait for it."""
    pipeline = Pipeline(make(attn_res_block_size=3), microbatches=4)
    pipeline.run_step(batch())
    if os.environ["HOW"] == "saving" and dist.get_rank() == dist.get_world_size() - 1:
        pipeline.model.state_dict = lambda: os._exit(3)
    elif dist.get_rank() == dist.get_world_size() - 1:
        layer = pipeline.stages[0].model.model.layers[-1]
        hang = os.environ["HOW"] == "hanging"
        layer.register_forward_hook(lambda *args: time.sleep(15) if hang else os._exit(3))
    with one_line_errors():
        if os.environ["HOW"] == "saving":
            save_weights(pipeline, output.with_name("saved"))
        pipeline.run_step(batch())


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    case, target = sys.argv[1:]
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get("TIMEOUT", "60"))))
    {
        "equal": equal,
        "tied": tied,
        "frozen": frozen,
        "families": families,
        "replicas": replicas,
        "count": count,
        "checkpoint": checkpoint,
        "checkpointing": checkpointing,
        "lost": lost,
    }[case](Path(target))
    dist.barrier()
    dist.destroy_process_group()
