# Copyright 2026 The attention-residuals authors. Licensed under the Apache License, Version 2.0.
"""Attention Residuals for decoders of transformers.

Importing this package registers its models with the Auto classes of transformers. A checkpoint that carries this
package's files as remote code loads without it, with `trust_remote_code=True`.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from . import configuration_attnres, modeling_attnres
from .configuration_attnres import *  # noqa: F403
from .modeling_attnres import *  # noqa: F403


__all__ = [*configuration_attnres.__all__, *modeling_attnres.__all__]

for _config_class, (_model_class, _causal_lm_class) in modeling_attnres.FAMILIES.items():
    AutoConfig.register(_config_class.model_type, _config_class)
    _config_class.register_for_auto_class()
    for _auto_class, _class in ((AutoModel, _model_class), (AutoModelForCausalLM, _causal_lm_class)):
        _auto_class.register(_config_class, _class)
        _class.register_for_auto_class(_auto_class.__name__)  # saved models carry their code
