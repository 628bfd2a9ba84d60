"""A GGUF file as a checkpoint folder: dequantised by transformers, where transformers understands all of it."""

from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from common.errors import UserError, reading
from common.files import check_file


def dequantise(path: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file to a folder, in fp32.

    Raises:
        UserError: transformers cannot read the file, or would leave out what belongs to its model.
    """
    check_file(path)
    check_understood(path)
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    quantization = transformers.GgufConfig(dequantize=True)  # else transformers refuses to save the model
    with reading(path):
        model, loading = AutoModelForCausalLM.from_pretrained(
            **where, quantization_config=quantization, dtype=torch.float32, output_loading_info=True
        )
    if missing := sorted(loading["missing_keys"]):
        raise UserError(f"{path}: no tensor for {', '.join(missing)}.")
    model.save_pretrained(folder)
    with reading(f"{path}: its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(**where)
    tokenizer.save_pretrained(folder)


def check_understood(path: Path) -> None:
    """Refuse a file of which transformers would leave out tensors, or how its positions are scaled.

    What it leaves out, as `rope_freqs`, is missing from the model that a port is compared with, too.

    Raises:
        UserError: names what would be left out.
    """
    with reading(path):
        from gguf import GGUFReader  # only who reads such files needs the package
        from transformers.modeling_gguf_pytorch_utils import (
            GGUF_TO_TRANSFORMERS_MAPPING,
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        # What the file holds
        reader = GGUFReader(path)
        tensors = [tensor.name for tensor in reader.tensors]
        values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("tokenizer.")}
        architecture = values["general.architecture"]
        if values[f"{architecture}.block_count"] > len(tensors):  # or a model larger than the file would be built
            raise UserError(f"{path}: {values[f'{architecture}.block_count']} blocks of {len(tensors)} tensors.")
        # What transformers reads of it: tensors, by the names of a model without storage, and settings
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
        used = get_gguf_hf_weights_map(model, processor)
        settings = GGUF_TO_TRANSFORMERS_MAPPING["config"]
        settings = settings.get(config.model_type) or settings.get(architecture, {})
    unused = [name for name in tensors if name not in used and name.removesuffix(".weight") not in used]
    if config.model_type != "gpt_oss":  # transformers reads its scaling by other means
        rope, scaling = f"{architecture}.rope.", f"{architecture}.rope.scaling."
        unread = [k for k in values if k.startswith(rope) and k.removeprefix(f"{architecture}.") not in settings]
        unused += [key for key in unread if not (key.startswith(scaling) and values.get(f"{scaling}type") == "none")]
    if unused:
        raise UserError(
            f"{path}: transformers leaves out {', '.join(unused[:5])}{' …' if unused[5:] else ''}, so it would compute "
            "something else. Port the checkpoint that the file was made from."
        )
