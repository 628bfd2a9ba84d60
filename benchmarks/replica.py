"""Measure what depth attention costs at the true width, depth and vocabulary of Kimi-Linear-48B-A3B, random weights.

Of its experts only as many are kept as a token is routed to: a token costs what it costs in the 48B model, and the
replica fits a common machine (3.5B parameters). One set of weights serves depth attention and standard residuals.
"""

import copy
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from common.quiet import quiet_transformers
from modeling_attnres import AttnResKimiLinearConfig, is_depth_parameter

from .measure import compare, report


CONFIG = Path(__file__).parent.parent / "configuration/Kimi-Linear-48B-A3B"


def replica(dtype: torch.dtype) -> dict[str, torch.nn.Module]:
    """Make the replica with standard residuals and with blocks as in the paper, sharing all weights."""
    config = AttnResKimiLinearConfig.from_pretrained(CONFIG)
    config.num_experts = config.num_experts_per_token
    torch.manual_seed(0)
    blocks = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.device("meta"):
        config = copy.deepcopy(config)
        config.attn_res_mode = "none"
        none = AutoModelForCausalLM.from_config(config, dtype=dtype)
    shared = {name: tensor for name, tensor in blocks.state_dict().items() if not is_depth_parameter(name)}
    none.load_state_dict(shared, assign=True)
    return {"standard residuals": none.eval(), "9 blocks": blocks}


@quiet_transformers()
@torch.no_grad()
def measure_replica(prefill: int, context: int, repeats: int, dtype: str, output: Path | None) -> None:
    """Measure a prefill, and a decoded token after a context."""
    models = replica(getattr(torch, dtype))
    parameters = sum(parameter.numel() for parameter in models["9 blocks"].parameters())
    ids = torch.randint(5, 100_000, (1, max(prefill, context)), generator=torch.Generator().manual_seed(0))
    runs = {name: partial(model, ids[:, :prefill], logits_to_keep=1) for name, model in models.items()}
    results = {f"prefill of {prefill}": compare(runs, max(3, repeats // 5), f"prefill of {prefill}")}
    runs = {}
    for name, model in models.items():
        cache = DynamicCache(config=model.config)
        model(ids[:, :context], cache=cache, use_cache=True, logits_to_keep=1)
        runs[name] = partial(model, ids[:, :1], cache=cache, use_cache=True)
    results[f"a token at {context}"] = compare(runs, repeats, f"a token at {context}")
    report(f"Replica of Kimi-Linear-48B-A3B, {parameters / 1e9:.2f}B parameters, {dtype}", results, output)
