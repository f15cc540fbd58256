"""transformers' own tests of XLNet models, from a checkout, on our classes; each test that may fail has a reason."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests import ROOT

CHECKOUT = os.environ.get("XLNET_KERNELS_TRANSFORMERS")
SUITE = "tests/models/xlnet/test_modeling_xlnet.py"
MAY_FAIL = {
    "generate takes arguments of its own: no beams, embeddings, processors or dictionary outputs": (
        "test_(beam_sample|beam_search|greedy|sample)_generate(_dict_outputs?)?|test_generate_from_.*inputs_embeds.*"
        "|test_generate_without_input_ids|test_inherits_generation_mixin|test_left_padding_compatibility"
        "|test_prepare_inputs_for_generation_kwargs_forwards"
    ),
    "from_pretrained reads a whole model from a folder, and draws a new head where new_head asks for it": (
        "test_base_model_prefix_loads_base_weights|test_correct_missing_keys|test_from_pretrained_no_checkpoint"
        "|test_model_weights_reload_no_missing_tied_weights|test_cannot_load_with_meta_device_context_manager"
        "|test_can_load_ignoring_mismatched_shapes|test_load_with_mismatched_shapes"
    ),
    "save_pretrained writes no generation_config.json": "test_save_load",
    "init_weights() and post_init() of transformers' base class are called": (
        "test_all_tensors_are_parameter_or_buffer|test_init_weights_can_init_buffers"
        "|test_resize_embeddings_untied_no_reinit_on_post_init"
    ),
    "its class GradientCheckpointingLayer, use_reentrant=True or config.gradient_checkpointing is asked for": (
        "test_gradient_checkpointing_(backward_compatibility|enable_disable)|test_training_gradient_checkpointing.*"
        "|test_peft_gradient_checkpointing_enable_disable"
    ),
    "the words of an error are compared": "test_resize_tokens_embeddings",
}


@pytest.mark.slow
@pytest.mark.skipif(
    not CHECKOUT,
    reason="XLNET_KERNELS_TRANSFORMERS names no checkout of transformers (its packages come without these tests)",
)
def test_transformers_own_tests_pass_on_our_models(tmp_path):
    checkout = Path(str(CHECKOUT)).resolve()
    assert (checkout / SUITE).is_file(), f"XLNET_KERNELS_TRANSFORMERS={checkout} has no {SUITE}"
    paths = [str(ROOT / "tests/model"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", SUITE, "-q", "-p", "no:cacheprovider", "-p", "ours_for_transformers"]
    done = subprocess.run(
        [*command, f"--junitxml={report}", "--tb=short"], cwd=checkout, env=environment, capture_output=True, text=True
    )
    assert report.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    failed, passed = {}, set()
    for case in ElementTree.parse(report).iter("testcase"):
        problem = next((x for x in case if x.tag in ("failure", "error")), None)
        name = case.attrib["name"].partition(" ")[0]
        if problem is not None:
            failed[name] = (problem.text or "")[-1000:]
        elif case.find("skipped") is None:
            passed.add(name)
    unexpected = {x: text for x, text in failed.items() if not any(re.fullmatch(y, x) for y in MAY_FAIL.values())}
    assert not unexpected, "\n\n".join(f"{name}:\n{text}" for name, text in unexpected.items())
    # A sample, so that a suite that was skipped or renamed does not count as one that passes.
    wanted = {"test_model_outputs_equivalence", "test_attention_outputs", "test_hidden_states_output", "test_xlnet_qa"}
    assert len(passed) > 60 and wanted <= passed, sorted(passed)
