"""An encoder of a speech toolkit, or one layer, made by the toolkit itself, and the ways in which it computes it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from .harness import CannotRun

# Built for one torch, or one GPU.
UNNEEDED = {"speechbrain": "torchaudio", "fairseq2": "fairseq2n"}


@dataclass(frozen=True)
class Layer:
    """A layer, or an encoder, in eval mode without dropout, how frames go through it, and how it is told its ways.

    `call(module, x)` gives (B, L, d_model), without padding, of x (B, step * L, width). The first of the ways is the
    toolkit's default.
    """

    module: nn.Module
    call: Callable[[nn.Module, Tensor], Tensor]
    ways: dict[str, Callable[[nn.Module], object]]
    step: int = 1  # frames of the input for one of the output
    width: int | None = None  # of the input, where it is not d_model
    has_float64: bool = True  # whether the toolkit's own code computes in it
    has_maps: bool = True  # whether the toolkit's own code makes maps of L x L


def leave_out_unneeded(toolkit: str) -> None:
    """An empty module in the place of what the toolkit imports and its layers do not need."""
    unneeded = UNNEEDED.get(toolkit)
    if unneeded is None or unneeded in sys.modules or importlib.util.find_spec(toolkit) is None:
        return
    module = sys.modules[unneeded] = ModuleType(unneeded)
    module.__spec__ = importlib.machinery.ModuleSpec(unneeded, None)
    module.DOC_MODE = True  # what fairseq2 asks of fairseq2n: whether to do without it


def build(toolkit: str, length: int, d_model: int, heads: int, layers: int | None = None) -> Layer:
    """One layer, or the encoder of so many. CannotRun where the toolkit is not there, with the reason."""
    leave_out_unneeded(toolkit)
    torch.manual_seed(0)
    makers: dict[str, Callable[..., Layer]] = _BUILD if layers is None else _BUILD_ENCODER
    if toolkit not in makers:
        raise CannotRun(f"{toolkit} has no {'layer' if layers is None else 'encoder'} here")
    try:
        layer = makers[toolkit](length, d_model, heads, *([] if layers is None else [layers]))
    except ImportError as error:
        raise CannotRun(f"{toolkit} cannot be imported: {error}") from error
    for name, parameter in layer.module.named_parameters():
        if "bias_u" in name or "bias_v" in name or "u_bias" in name or "v_bias" in name:  # of some size: they count
            nn.init.normal_(parameter, std=0.3)
    layer.module.eval()
    return layer


def _nemo_use(sdpa: bool) -> Callable[[nn.Module], object]:
    def tell(module: nn.Module) -> None:
        for part in module.modules():
            if hasattr(part, "use_pytorch_sdpa"):
                part.use_pytorch_sdpa = sdpa

    return tell


_NEMO_WAYS = {"NeMo sdpa": _nemo_use(True), "NeMo": _nemo_use(False)}


def _nemo(length: int, d_model: int, heads: int) -> Layer:
    from nemo.collections.asr.parts.submodules.conformer_modules import ConformerLayer
    from nemo.collections.asr.parts.submodules.multi_head_attention import RelPositionalEncoding

    module = ConformerLayer(d_model, 4 * d_model, n_heads=heads, conv_kernel_size=9, dropout=0.0, dropout_att=0.0)
    encoding = RelPositionalEncoding(d_model, 0.0)
    encoding.extend_pe(length, "cpu", torch.float32)
    table = encoding.pe

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        middle = table.shape[1] // 2
        return layer(x, pos_emb=table[:, middle - x.shape[1] + 1 : middle + x.shape[1]].to(x))

    return Layer(module, call, _NEMO_WAYS)


def _espnet(length: int, d_model: int, heads: int) -> Layer:
    from espnet.nets.pytorch_backend.conformer.convolution import ConvolutionModule
    from espnet.nets.pytorch_backend.conformer.encoder_layer import EncoderLayer
    from espnet.nets.pytorch_backend.transformer.attention import RelPositionMultiHeadedAttention
    from espnet.nets.pytorch_backend.transformer.embedding import RelPositionalEncoding
    from espnet.nets.pytorch_backend.transformer.positionwise_feed_forward import PositionwiseFeedForward

    feed = (PositionwiseFeedForward(d_model, 4 * d_model, 0.0, nn.SiLU()) for _ in range(2))
    attention = RelPositionMultiHeadedAttention(heads, d_model, 0.0)
    module = EncoderLayer(d_model, attention, *feed, ConvolutionModule(d_model, 9, nn.SiLU()), 0.0)
    table = RelPositionalEncoding(d_model, 0.0)(torch.zeros(1, length, d_model))[1]
    return Layer(module, lambda layer, x: layer((x, table.to(x)), None)[0][0], {"ESPnet": lambda layer: None})


def _speechbrain(length: int, d_model: int, heads: int) -> Layer:
    from speechbrain.lobes.models.transformer.Conformer import ConformerEncoderLayer
    from speechbrain.nnet.attention import RelPosEncXL

    module = ConformerEncoderLayer(d_model, 4 * d_model, heads, kernel_size=9)
    table = RelPosEncXL(d_model).make_pe(length)
    call = lambda layer, x: layer(x, pos_embs=table.to(x))[0]  # noqa: E731
    return Layer(module, call, {"SpeechBrain": lambda layer: None}, has_float64=False)  # softmax in float32


def _fairseq2_block(length: int, d_model: int, heads: int) -> nn.Module:
    from fairseq2.models.conformer import ConformerBlock, ConformerConvolution
    from fairseq2.models.transformer import (
        RelativePositionalEncoding,
        RelativePositionSDPA,
        StandardFeedForwardNetwork,
        StandardMultiheadAttention,
    )
    from fairseq2.models.transformer.attention_bias import IdentityBias
    from fairseq2.nn import StandardLayerNorm

    feed = [StandardFeedForwardNetwork(d_model, 4 * d_model, True, inner_activation=nn.SiLU()) for _ in range(2)]
    norms = [StandardLayerNorm(d_model, bias=True) for _ in range(5)]
    sdpa = RelativePositionSDPA(d_model, heads, RelativePositionalEncoding(d_model, length), IdentityBias())
    attention = StandardMultiheadAttention(d_model, heads, sdpa)
    convolution = ConformerConvolution(d_model, 9)
    return ConformerBlock(norms[0], feed[0], norms[1], attention, norms[2], convolution, norms[3], feed[1], norms[4])


def _fairseq2(length: int, d_model: int, heads: int) -> Layer:
    from fairseq2.models.transformer.attention_bias import AttentionBiasCache
    from fairseq2.nn import BatchLayout

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x, BatchLayout((x.shape[0], x.shape[1]), None, device=x.device), AttentionBiasCache())

    return Layer(_fairseq2_block(length, d_model, heads), call, {"fairseq2": lambda layer: None})


def _parakeet_encoder(length: int, d_model: int, heads: int, layers: int) -> Layer:
    from transformers import ParakeetEncoder, ParakeetEncoderConfig

    dropouts = ("dropout", "dropout_positions", "layerdrop", "activation_dropout", "attention_dropout")
    config = ParakeetEncoderConfig(
        hidden_size=d_model,
        intermediate_size=4 * d_model,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        **dict.fromkeys(dropouts, 0.0),
    )

    def use(attention: str) -> Callable[[nn.Module], object]:
        return lambda encoder: setattr(encoder.config, "_attn_implementation", attention)  # its layers have the same

    ways = {"transformers sdpa": use("sdpa"), "transformers eager": use("eager")}
    module = ParakeetEncoder(config)
    step = config.subsampling_factor
    return Layer(module, lambda encoder, x: encoder(x).last_hidden_state, ways, step, config.num_mel_bins)


def _speechbrain_encoder(length: int, d_model: int, heads: int, layers: int) -> Layer:
    from speechbrain.lobes.models.transformer.Conformer import ConformerEncoder
    from speechbrain.nnet.attention import RelPosEncXL

    module = ConformerEncoder(layers, d_model, 4 * d_model, heads, kernel_size=9)
    table = RelPosEncXL(d_model).make_pe(length)
    call = lambda encoder, x: encoder(x, pos_embs=table.to(x))[0]  # noqa: E731
    return Layer(module, call, {"SpeechBrain": lambda encoder: None}, has_float64=False)


def _call_nemo(encoder: nn.Module, x: Tensor) -> Tensor:
    frames = torch.full((x.shape[0],), x.shape[1], device=x.device)
    return encoder(audio_signal=x.mT, length=frames)[0].mT


def _nemo_encoder(length: int, d_model: int, heads: int, layers: int) -> Layer:
    """Parakeet's: from mel features on."""
    from nemo.collections.asr.modules.conformer_encoder import ConformerEncoder

    bins, step = 80, 8
    dropouts = ("dropout", "dropout_pre_encoder", "dropout_emb", "dropout_att")
    module = ConformerEncoder(
        feat_in=bins, n_layers=layers, d_model=d_model, n_heads=heads, subsampling="dw_striding",
        subsampling_factor=step, subsampling_conv_channels=256, conv_kernel_size=9, xscaling=False,
        pos_emb_max_len=length, **dict.fromkeys(dropouts, 0.0),
    )  # fmt: skip

    return Layer(module, _call_nemo, _NEMO_WAYS, step, bins)


def _nemo_local_encoder(length: int, d_model: int, heads: int, layers: int) -> Layer:
    """NeMo's way for long audio, a window of 128 frames on each side; from frames on, behind the subsampling."""
    from nemo.collections.asr.modules.conformer_encoder import ConformerEncoder

    dropouts = ("dropout", "dropout_pre_encoder", "dropout_emb", "dropout_att")
    module = ConformerEncoder(
        feat_in=d_model, n_layers=layers, d_model=d_model, n_heads=heads, subsampling_factor=1, conv_kernel_size=9,
        xscaling=False, self_attention_model="rel_pos_local_attn", att_context_size=[128, 128],
        pos_emb_max_len=length, **dict.fromkeys(dropouts, 0.0),
    )  # fmt: skip
    return Layer(module, _call_nemo, {"NeMo local": lambda encoder: None}, has_maps=False)


def _espnet_encoder(length: int, d_model: int, heads: int, layers: int) -> Layer:
    from espnet2.asr.encoder.conformer_encoder import ConformerEncoder

    dropouts = ("dropout_rate", "positional_dropout_rate", "attention_dropout_rate")
    module = ConformerEncoder(
        d_model, d_model, heads, 4 * d_model, layers, input_layer="linear", macaron_style=True, rel_pos_type="latest",
        cnn_module_kernel=9, max_pos_emb_len=length, **dict.fromkeys(dropouts, 0.0),
    )  # fmt: skip

    def call(encoder: nn.Module, x: Tensor) -> Tensor:
        return encoder(x, torch.full((x.shape[0],), x.shape[1], device=x.device))[0]

    return Layer(module, call, {"ESPnet": lambda encoder: None})


def _fairseq2_encoder(length: int, d_model: int, heads: int, layers: int) -> Layer:
    from fairseq2.models.transformer import StandardTransformerEncoder
    from fairseq2.nn import BatchLayout

    module = StandardTransformerEncoder([_fairseq2_block(length, d_model, heads) for _ in range(layers)])

    def call(encoder: nn.Module, x: Tensor) -> Tensor:
        return encoder(x, BatchLayout((x.shape[0], x.shape[1]), None, device=x.device))

    return Layer(module, call, {"fairseq2": lambda encoder: None})


_BUILD = {"nemo": _nemo, "espnet": _espnet, "speechbrain": _speechbrain, "fairseq2": _fairseq2}
_BUILD_ENCODER = {
    "parakeet": _parakeet_encoder, "nemo": _nemo_encoder, "nemo-local": _nemo_local_encoder,
    "espnet": _espnet_encoder, "speechbrain": _speechbrain_encoder, "fairseq2": _fairseq2_encoder,
}  # fmt: skip
NAMES = tuple(_BUILD)
ENCODERS = tuple(_BUILD_ENCODER)
