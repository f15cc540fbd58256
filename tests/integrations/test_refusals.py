"""Refusals of accelerate, and its messages about known and replaced classes."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
from torch import nn

import xlnet_kernels as xk
from tests.integrations.toolkit_cases import (
    espnet,
    fairseq2_shaw,
    make,
    nemo_transformer,
)
from xlnet_kernels import info
from xlnet_kernels.integrations import accelerated
from xlnet_kernels.integrations._libraries import LIBRARIES

pytestmark = pytest.mark.usefixtures("one_thread")


def with_attributes(module, **attributes):
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


REFUSED = {
    "nemo-transformer": (
        lambda s: with_attributes(nemo_transformer(s), self_attention_model="abs_pos"),
        """must have self_attention_model "rel_pos" to be accelerated, got 'abs_pos': it has no relative term""",
    ),
    "fairseq2-values": (
        lambda s: with_attributes(fairseq2_shaw(s), rel_v_embed=nn.Embedding(6, 8)),
        "with use_rel_pos_values: values have positions too",
    ),
    "espnet-legacy": (
        lambda s: espnet(s, "LegacyRelPositionMultiHeadedAttention"),
        "without zero_triu: keys ahead of a query get position scores of the next query",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_is_refused_and_nothing_is_changed(case, toolkits):
    make_one, text = REFUSED[case]
    good, bad = make(case.partition("-")[0], toolkits), make_one(toolkits)
    kinds = type(good), type(bad)
    with pytest.raises(ValueError, match=text):
        xk.accelerate(nn.ModuleList([good, bad]))
    assert (type(good), type(bad)) == kinds


def test_a_class_that_cannot_be_exchanged_changes_nothing(small):
    class Fixed(small.RelPositionMultiHeadAttention):
        def __setattr__(self, name, value):
            if name == "__class__":
                raise TypeError("its class is fixed")
            super().__setattr__(name, value)

    model = nn.ModuleList([make("nemo", lambda toolkit: small), Fixed()])
    kinds = [type(module) for module in model]
    with pytest.raises(TypeError, match="its class is fixed"):
        xk.accelerate(model)
    assert [type(module) for module in model] == kinds and not any("backend" in vars(module) for module in model)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_versions_that_are_not_served_are_refused(library, small, monkeypatch):
    cls = type(next(iter(library.classes)), (nn.Module,), {"__module__": f"{library.roots[0]}.some.where"})
    monkeypatch.setitem(sys.modules, library.roots[0], SimpleNamespace(__version__="0.0.9"))
    with pytest.raises(ValueError, match=rf"{library.name} 0.0.9 cannot be accelerated: version {library.least} or"):
        xk.accelerate(nn.Sequential(cls()))


def test_a_class_of_the_same_name_with_another_forward_is_refused(small):
    """ESPnet's transducer has one."""

    def forward(self, query, key, value, pos_enc, mask, chunk_mask=None): ...

    names = {"__module__": "espnet2.asr_transducer.encoder.modules.attention", "forward": forward}
    cls = type("RelPositionMultiHeadedAttention", (nn.Module,), names)
    with pytest.raises(
        ValueError, match=r"asr_transducer.*takes \(query, key, value, pos_enc, mask, chunk_mask\), expected"
    ):
        xk.accelerate(cls())


def test_models_with_nothing_to_replace_say_what_they_have():
    layer = nn.TransformerEncoderLayer(8, 2)
    with pytest.raises(ValueError, match=r"got MultiheadAttention \(torch's has no relative positions\); .*--models"):
        xk.accelerate(layer)
    with pytest.raises(ValueError, match="got Linear; .*transformers, NeMo, ESPnet, SpeechBrain, fairseq2"):
        xk.accelerate(nn.Linear(1, 1))
    capped = type("Gemma4AudioAttention", (nn.Module,), {"__module__": "transformers.models.gemma4.modeling_gemma4"})
    with pytest.raises(ValueError, match=r"got Gemma4AudioAttention \(its scores are capped before the softmax\)"):
        xk.accelerate(nn.Sequential(capped()))
    with pytest.raises(ValueError, match=r"got TwoStreamAttention \(it calls rel_attention already\)"):
        xk.accelerate(xk.TwoStreamAttention(8, 2))
    assert accelerated(layer) == {} and xk.restore(layer) is layer


def test_what_was_replaced_is_said_in_one_line(small, caplog):
    model = nn.ModuleList([make("nemo", lambda toolkit: small), make("espnet", lambda toolkit: small)])
    with caplog.at_level(logging.INFO, "xlnet_kernels"):
        xk.accelerate(model)
    wanted = {"NeMo RelPositionMultiHeadAttention": 1, "ESPnet RelPositionMultiHeadedAttention": 1}
    assert accelerated(model) == wanted
    (record,) = caplog.records
    assert record.getMessage() == "accelerated: " + ", ".join(f"1 x {name}" for name in wanted)


def test_no_toolkit_is_imported():
    code = """
import sys, torch, xlnet_kernels as xk
before = set(sys.modules)
assert not [name for name in before if name.startswith("xlnet_kernels.integrations._accelerate")]
try:
    xk.accelerate(torch.nn.Linear(1, 1))
except ValueError:
    pass
assert xk.restore is xk.integrations.transformers.restore and "accelerate" in dir(xk)
roots = {name.partition(".")[0] for name in sys.modules}
assert not roots & {"transformers", "nemo", "espnet", "espnet2", "speechbrain", "fairseq2", "onnx"}
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_info_lists_what_is_known(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["info", "--models"])
    assert info.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    for library in LIBRARIES:
        (head,) = (line for line in lines if line.startswith(f"{library.name}, from {library.least} on; here: "))
        for name in (*library.classes, *library.refused):
            assert any(line.strip().startswith(name) for line in lines), name


def test_every_stand_in_is_there():
    for library in LIBRARIES[1:]:  # those of transformers import it
        for name, (module, _) in library.classes.items():
            name = name.rpartition(".")[2]
            assert getattr(importlib.import_module(f"xlnet_kernels.integrations.{module}"), name).__name__ == name
