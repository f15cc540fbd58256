"""Model cards with the facts of a run: data, objective, steps, losses and commit."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import ModelCard, ModelCardData

import xlnet_kernels as xk
from parts.corpus import unigram_entropy

if TYPE_CHECKING:
    from parts.run import Run

LOADING = """```python
import xlnet_kernels as xk
from transformers import AutoTokenizer, {model}

tokenizer = AutoTokenizer.from_pretrained("this folder")
model = xk.{model}.from_pretrained("this folder")
same = {model}.from_pretrained("this folder")  # transformers' own
```"""


def commit() -> str:
    """The commit of the imported source tree, or the version of an installed package."""
    root, git = Path(xk.__file__).parents[1], ["git", "-C"]
    try:
        head = subprocess.run([*git, str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, str(root), "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return f"version {xk.__version__}"
    return f"commit {head.stdout.strip()}" + (" with changes" if changed.stdout.strip() else "")


def of_pretraining(run: Run) -> ModelCard:
    """The card of a run's current language model."""
    options, corpus, config = run.options, run.corpus, run.config
    data = "the manual that comes with Python" if options.text is None else f"`{Path(options.text).name}`"
    before = f"from `{options.checkpoint.name}`, " if options.checkpoint else ""
    size = sum(parameter.numel() for parameter in run.model.parameters())
    rows = {
        "objective": options.objective,
        "text": f"{data}: {len(corpus.text.bounds) - 1:,} documents, {corpus.bytes:,} bytes, {len(corpus.text):,} "
        f"tokens, sha256 of the tokens {corpus.sha256[:16]}; the last {options.held_out:.0%} held out",
        "vocabulary": f"{config.vocab_size:,}" + (", bytes" if corpus.tokenizer.is_bytes else ""),
        "model": f"{size:,} parameters: {config.n_layer} layers, d_model {config.d_model}, {config.n_head} heads",
        "training": f"{before}step {run.step:,} of {options.steps:,}, {options.batch_size} sequences of "
        f"{options.seq_len} tokens each, {config.mem_len} tokens of memory, seed {options.seed}",
    }
    names = {"loss": "training loss of the last batch", "validation_loss": "loss in the held-out part"}
    rows |= {names[name]: corpus.describe(loss) for name, loss in run.losses.items()}
    rows["unigram entropy of the text"] = corpus.describe(unigram_entropy(corpus.text))
    return make("XLNet, pre-trained", rows, xk.XLNetLMHeadModel, "text-generation")


def make(title: str, rows: dict[str, str], model: type, pipeline: str) -> ModelCard:
    """A card with a table of facts and code to load the model."""
    made = {"made with": f"xlnet_kernels {commit()}, torch {torch.__version__}"}
    table = "\n".join(f"| {name} | {value} |" for name, value in (rows | made).items())
    header = ModelCardData(library_name="transformers", pipeline_tag=pipeline, tags=["xlnet"])
    loading = LOADING.format(model=model.__name__)
    return ModelCard(f"---\n{header.to_yaml()}\n---\n\n# {title}\n\n| | |\n|---|---|\n{table}\n\n{loading}\n")
