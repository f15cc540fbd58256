"""A plugin for pytest, in transformers' own test run: our models stand in the place of its XLNet models.

Its tests also read private names of its base class. They get the values that send them the way that fits our models.
"""

from __future__ import annotations

import transformers
from transformers.models.xlnet import modeling_xlnet

import xlnet_kernels as xk

NAMES = (
    "XLNetModel",
    "XLNetLMHeadModel",
    "XLNetForMultipleChoice",
    "XLNetForQuestionAnswering",
    "XLNetForQuestionAnsweringSimple",
    "XLNetForSequenceClassification",
    "XLNetForTokenClassification",
)
PRIVATE = dict(
    _from_config=classmethod(lambda cls, config, **_: cls(config)),
    _can_set_attn_implementation=classmethod(lambda cls: False),
    _can_set_experts_implementation=classmethod(lambda cls: False),
    _can_compile_fullgraph=False,
    _is_stateful=False,
    _keep_in_fp32_modules=(),
    _keep_in_fp32_modules_strict=(),
    _keys_to_ignore_on_load_missing=None,
    _keys_to_ignore_on_load_unexpected=None,
    _supports_attention_backend=False,
    _supports_flash_attn=False,
    _supports_flex_attn=False,
    _supports_sdpa=False,
    tp_plan={},
    vocab_size=property(lambda self: self.config.vocab_size),
)

xk.XLNetConfig.sub_configs = {}  # type: ignore[attr-defined]
for name in NAMES:
    ours = getattr(xk, name)
    for attribute, value in PRIVATE.items():
        setattr(ours, attribute, value)
    setattr(transformers, name, ours)
    setattr(modeling_xlnet, name, ours)
