"""What other libraries look up by the model type or class name holds for a port as for its base."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoTokenizer, Trainer, TrainingArguments, conversion_mapping
from transformers.models.auto import modeling_auto
from transformers.pipelines import pipeline

from tests.families import BY_NAME, Family, tokens
from tests.oracle import relative_error


ROOT = Path(__file__).parents[2]
QWEN2_MOE = Family("Qwen2Moe", BY_NAME["Qwen3Moe"].tiny | {"shared_expert_intermediate_size": 16})


@pytest.fixture(
    params=[*(BY_NAME[name] for name in ("Llama", "Mixtral", "Qwen3Moe", "DeepseekV3", "KimiLinear")), QWEN2_MOE],
    ids=lambda family: family.name,
)
def family(request):
    """One of each kind of rule for experts, and one without experts."""
    return request.param


def base_and_port(family, folder, **fields):
    """A tiny base model, saved, and its port with zero queries."""
    base = family.base_causal_lm(**fields)
    base.save_pretrained(folder)
    return base, family.ours("ForCausalLM").from_pretrained(folder, attn_res_scale_norm_eps=True).eval()


def logits(model):
    with torch.no_grad():
        return model(tokens()).logits


def adapted(model) -> dict[str, torch.Tensor]:
    """What LoRA added."""
    return {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}


def assert_adapts_alike(base, port, before: torch.Tensor):
    """The same parameters, which change the logits, and those of both alike."""
    theirs, ours = adapted(base), adapted(port)
    assert theirs
    assert {name: value.shape for name, value in ours.items()} == {name: value.shape for name, value in theirs.items()}
    expected = logits(base.eval())
    assert relative_error(expected, before) > 1e-2
    assert relative_error(logits(port.eval()), expected) <= 3e-6


def randomise(model):
    generator = torch.Generator().manual_seed(0)
    for _, parameter in sorted(adapted(model).items()):
        parameter.data.normal_(std=0.1, generator=generator)


# ---------------------------------------------------------------------------------------------------------------- PEFT


def test_lora_without_targets_adapts_what_it_adapts_in_the_base(family, tmp_path):
    base, port = base_and_port(family, tmp_path / "base")
    before = logits(base)
    try:
        base = get_peft_model(base, LoraConfig())
    except ValueError as error:  # PEFT knows no targets for this family
        with pytest.raises(type(error), match=re.escape(str(error))):
            get_peft_model(port, LoraConfig())
        return
    port = get_peft_model(port, LoraConfig())
    randomise(base)
    randomise(port)
    assert_adapts_alike(base, port, before)


def test_all_linear_adapts_what_it_adapts_in_the_base_experts_included(family, tmp_path):
    base, port = base_and_port(family, tmp_path / "base")
    before = logits(base)
    base, port = (get_peft_model(model, LoraConfig(target_modules="all-linear")) for model in (base, port))
    randomise(base)
    randomise(port)
    assert_adapts_alike(base, port, before)
    if family.name in OLD_LAYOUTS:
        assert any(".experts." in name for name in adapted(port))


IN_ORDER = """
import importlib
from tests.training.test_libraries import QWEN2_MOE, BY_NAME

families = [BY_NAME["Llama"], BY_NAME["Mixtral"], BY_NAME["Qwen3Moe"], QWEN2_MOE]
tables = "peft.utils.transformers_weight_conversion"
if {peft_first}:
    importlib.import_module(tables)
models = [family.causal_lm() for family in families]
rules = importlib.import_module(tables)._MODEL_TO_CONVERSION_PATTERN
for model in models:
    base_type, model_type = model.config.base_model_type(), model.config.model_type
    assert rules.get(model_type) == rules.get(base_type), (model_type, rules.get(model_type), rules.get(base_type))
"""


@pytest.mark.slow
@pytest.mark.parametrize("peft_first", [True, False], ids=["PEFT first", "families first"])
def test_peft_has_the_rules_for_experts_in_whichever_order_things_are_imported(peft_first):
    """It copies transformers' table when it first needs it."""
    code = IN_ORDER.format(peft_first=peft_first)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


# What experts and their linear maps were called when each expert was a module
OLD_LAYOUTS = {
    "Mixtral": ("block_sparse_moe", ("w1", "w3", "w2"), "intermediate_size"),
    "Qwen3Moe": ("mlp", ("gate_proj", "up_proj", "down_proj"), "moe_intermediate_size"),
}


def save_old_adapter(folder, config, layout: tuple, rank: int = 4) -> None:
    """A LoRA of every expert by itself and of the attention's query, as PEFT saved it when experts were modules."""
    module, maps, width = layout
    hidden, inner = config.hidden_size, getattr(config, width)
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    generator = torch.Generator().manual_seed(0)
    state = {}

    # Every map has two tensors, under the name it has in its layer
    def adapt(name: str, inputs: int, outputs: int):
        for part, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
            tensor = torch.randn(shape, generator=generator) * 0.2
            state[f"base_model.model.model.layers.{name}.{part}.weight"] = tensor

    for layer in range(config.num_hidden_layers):
        adapt(f"{layer}.self_attn.q_proj", hidden, config.num_attention_heads * config.head_dim)
        for expert in range(experts):
            gate, up, down = (f"{layer}.{module}.experts.{expert}.{name}" for name in maps)
            adapt(gate, hidden, inner)
            adapt(up, hidden, inner)
            adapt(down, inner, hidden)
    # The files of an adapter
    folder.mkdir()
    save_file(state, folder / "adapter_model.safetensors")
    config = LoraConfig(r=rank, lora_alpha=8, target_modules=["q_proj", *maps], task_type="CAUSAL_LM")
    config.save_pretrained(folder)


@pytest.mark.parametrize("name", OLD_LAYOUTS)
def test_an_adapter_of_each_expert_in_the_old_layout_adapts_the_port_as_the_base(name, tmp_path):
    fields = {"head_dim": 8} | ({"mlp_only_layers": []} if name == "Qwen3Moe" else {})
    base, port = base_and_port(BY_NAME[name], tmp_path / "base", **fields)
    save_old_adapter(tmp_path / "adapter", base.config, OLD_LAYOUTS[name])
    before = logits(base)
    base, port = (PeftModel.from_pretrained(model, tmp_path / "adapter") for model in (base, port))
    assert any(".experts." in name for name in adapted(base))
    for name, value in adapted(base).items():
        assert torch.equal(adapted(port)[name], value)
        assert value.any(), f"{name}: left as it started"
    assert_adapts_alike(base, port, before)


# ------------------------------------------------------------------------------------------------------------- Trainer


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: get_peft_model(model, LoraConfig())])
def test_label_smoothing_gives_the_loss_of_the_base(wrap, tmp_path):
    """Trainer looks the class up among causal language models: of others it does not shift the labels."""
    arguments = TrainingArguments(tmp_path, label_smoothing_factor=0.1, report_to="none", use_cpu=True)
    rows = [{"input_ids": row, "labels": row} for row in tokens(batch=4)]
    found = [
        Trainer(wrap(model), arguments, eval_dataset=rows).evaluate()["eval_loss"]
        for model in base_and_port(BY_NAME["Llama"], tmp_path / "base")
    ]
    assert found[1] == pytest.approx(found[0], rel=1e-5)


# ---------------------------------------------------------------------------------------------------------- tokenizers


@pytest.mark.parametrize("declared", [True, False], ids=["class declared", "class not declared"])
@pytest.mark.parametrize("name", ["Llama", "Mixtral", "Qwen2", "Qwen3", "Phi3", "Nemotron"])
def test_a_port_has_the_tokenizer_of_its_base(name, declared, tokenizer, tmp_path):
    """Whether the checkpoint declares the class of its tokenizer, rightly or not, or leaves it to the model type."""
    import modeling_attnres

    base, port = tmp_path / "base", tmp_path / "port"
    ours = getattr(modeling_attnres, f"AttnRes{name}Config")
    tokenizer.save_pretrained(base)
    path = base / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("tokenizer_class")
    if declared:
        config["tokenizer_class"] = "LlamaTokenizer"
    path.write_text(json.dumps(config))
    shutil.copytree(base, port)
    ours.base_class().save_pretrained(base)
    ours().save_pretrained(port)
    theirs, ours = AutoTokenizer.from_pretrained(base), AutoTokenizer.from_pretrained(port)
    assert type(ours) is type(theirs)
    text = "w1 w2  <user> w89, w3\n"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]


# -------------------------------------------------------------------------------------------------------- every table


def tables(module, names: str) -> dict[str, dict | set]:
    """The dicts and sets of a module whose names match."""
    return {
        name: table for name, table in vars(module).items() if isinstance(table, dict | set) and re.match(names, name)
    }


def entry(table: dict | set, key: str):
    return key in table if isinstance(table, set) else table.get(key)


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "Qwen2", "Qwen3Moe", "Phi3", "Jamba", "DeepseekV3", "KimiLinear"])
def test_every_table_by_model_type_has_the_port(name):
    config = Family(name, {}).ours("Config")
    base, port = config.base_model_type(), config.model_type
    alike = {
        "peft.utils.constants": "",
        "peft.utils.transformers_weight_conversion": "_MODEL_TO_",
        "peft.tuners.adaption_prompt.config": "",
        "transformers.models.auto.tokenization_auto": "TOKENIZER_MAPPING_NAMES|MODELS_",
    }
    modules = {module: importlib.import_module(module) for module in alike}
    config()  # built after the libraries were imported
    for module, names in alike.items():
        for name, table in tables(modules[module], names).items():
            assert entry(table, port) == entry(table, base), f"{module}: {name}"
    for name, table in tables(modeling_auto, "MODEL_.*MAPPING_NAMES").items():
        ours = f"AttnRes{entry(table, base)}"
        expected = ours if ours in config.class_names().values() else None
        assert entry(table, port) == expected, name
    rules = [conversion_mapping.get_checkpoint_conversion_mapping(model_type) for model_type in (port, base)]
    assert repr(rules[0]) == repr(rules[1])


def test_pipelines_know_the_port(tokenizer, caplog):
    """They look the class up among those they know, and log where it is not."""
    model = BY_NAME["Llama"].causal_lm()
    found = pipeline("text-generation", model, tokenizer=tokenizer)("w1 w2", max_new_tokens=3)
    assert found[0]["generated_text"].startswith("w1 w2")
    assert "not supported" not in caplog.text


def test_liger_patches_a_port_as_its_base(tmp_path):
    """It replaces classes of transformers before a model is made, and so in a process of its own."""
    pytest.importorskip("liger_kernel.transformers.monkey_patch", reason="Liger is not installed")
    family = BY_NAME["Llama"]
    family.base_causal_lm().save_pretrained(tmp_path / "base")
    family.causal_lm().save_pretrained(tmp_path / "port")
    code = """
import sys
import modeling_attnres
from liger_kernel.transformers import AutoLigerKernelForCausalLM
for folder in sys.argv[1:]:
    model = AutoLigerKernelForCausalLM.from_pretrained(folder)
    kinds = sorted(type(module).__name__ for module in model.modules())
    head = next(kind for kind in type(model).mro() if kind.__name__ == "LlamaForCausalLM")
    print([kind for kind in kinds if "Liger" in kind], head.forward.__module__)
"""
    # the port first: nothing has been patched for the base
    command = [sys.executable, "-c", code, str(tmp_path / "port"), str(tmp_path / "base")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    port, base = done.stdout.splitlines()[-2:]
    assert port == base
    assert "LigerRMSNorm" in port
    assert "liger_kernel" in port
