"""`python hugging_face_client.py FOLDER`: what a user of Hugging Face's `kernels` does with the repository there.

Loads it, compares operator and layer with their originals, and holds it against the rules of its requirements.
"""

from __future__ import annotations

import sys
from pathlib import Path

import kernels
import torch
from kernel_abi_check import IncompatibleAbi3Symbol, NonAbi3Symbol, ObjectFile
from kernels import LocalLayerRepository, Mode
from kernels._rust import Build, Digest, DigestAlgorithm, Metadata
from transformers import ParakeetEncoder, ParakeetEncoderConfig
from transformers.models.parakeet.modeling_parakeet import ParakeetEncoderAttention

LAYER = "ParakeetEncoderAttention"


def check_files(folder: Path) -> str:
    """build.toml, metadata.json with its digests, the extension's ABI; returns the kernel's name in this process."""
    assert [str(backend) for backend in Build.open(folder).general.backends] == ["cpu", "cuda"]
    (variant,) = (folder / "build").iterdir()
    assert variant.name.startswith("torch-stable-abi210-cpu-")
    facts = Metadata.read_from_file(variant / "metadata.json")
    facts.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    (extension,) = variant.glob("*.abi3.so")
    violations = ObjectFile(str(extension)).check_python_abi("3.9")
    assert not [found for found in violations if isinstance(found, (IncompatibleAbi3Symbol, NonAbi3Symbol))]
    return facts.id


def check_operator(folder: Path, name: str) -> None:
    xk = kernels.get_local_kernel(folder, backend="cpu")
    assert xk.backends()["cpu"].available and "xlnet_kernels" not in sys.modules
    inputs = [torch.randn(2, 4, 50, 16, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    inputs.append(torch.randn(4, 100, 16, dtype=torch.float64, requires_grad=True))
    results = []
    for backend in ("cpu", "reference"):
        out = xk.rel_attention(*inputs, mask=xk.RankMask.causal(2, 50), backend=backend)
        results.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
    torch.testing.assert_close(*results)
    assert getattr(torch.ops, name).rel_attention and not hasattr(torch.ops.xlnet_kernels, "rel_attention")


def check_layer(folder: Path, mode: Mode) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = ParakeetEncoderConfig(**sizes, intermediate_size=64, num_mel_bins=16, subsampling_conv_channels=8)
    model = ParakeetEncoder(config).eval()
    features, frames = torch.randn(2, 200, 16), torch.arange(200) < torch.tensor([[200], [150]])

    def results() -> list[torch.Tensor]:
        out = model(features, attention_mask=frames).last_hidden_state[:, :18]  # what the shorter one has
        attention = model.layers[0].self_attn
        return [out.detach(), *torch.autograd.grad(out.sin().sum(), (attention.q_proj.weight, attention.bias_v))]

    before = results()
    kernels.replace_kernel_forward_from_hub(ParakeetEncoderAttention, LAYER)
    kernels.register_kernel_mapping({LAYER: {"cpu": {mode: LocalLayerRepository(folder, layer_name=LAYER)}}})
    model = kernels.kernelize(model.train(mode == Mode.TRAINING), mode=mode, device="cpu", use_fallback=False).eval()
    assert "rel_attention" in model.layers[0].self_attn.forward.__func__.__code__.co_names
    torch.testing.assert_close(results(), before, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    torch.manual_seed(0)
    where = Path(sys.argv[1])
    check_operator(where, check_files(where))
    for kind in (Mode.INFERENCE, Mode.TRAINING):
        check_layer(where, kind)
    print("all right")
