"""Shaw's keys in transformers: Granite Speech in blocks, SpeechT5 with a limit, Wav2Vec2-BERT inside codecs."""

from __future__ import annotations

import importlib

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import xlnet_kernels as xk
from tests.integrations.speech_cases import LIMITS, SIZES, WAV2VEC2, one_thread  # noqa: F401
from tests.integrations.toolkit_cases import assert_same
from xlnet_kernels.integrations import accelerated, shaw
from xlnet_kernels.integrations.transformers import STAND_INS

GRANITE = dict(input_dim=16, num_layers=2, hidden_dim=32, num_heads=4, output_dim=7, context_size=6, max_pos_emb=9)
GRANITE |= dict(conv_kernel_size=5, dropout=0.0)
GRANITE5 = SIZES | dict(vocab_size=7, num_mel_bins=4, context_size=6, max_position_embeddings=9, conv_kernel_size=5)
SPEECHT5 = dict(hidden_size=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48)
SPEECHT5 |= dict(encoder_max_relative_position=5, encoder_layerdrop=0.0, vocab_size=20)
SPEECHT5 |= dict(decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48)
SPEECHT5 |= dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "positional_dropout"), 0.0)

# id: folder of transformers, encoder, configuration, sizes
CASES = {
    "granite": ("granite_speech", "GraniteSpeechCTCEncoder", "GraniteSpeechEncoderConfig", GRANITE),
    "granite plus": ("granite_speech_plus", "GraniteSpeechPlusCTCEncoder", "GraniteSpeechPlusEncoderConfig", GRANITE),
    "granite 5": ("granite_speech5", "GraniteSpeech5Encoder", "GraniteSpeech5EncoderConfig", GRANITE5),
    "speecht5": ("speecht5", "SpeechT5Encoder", "SpeechT5Config", SPEECHT5),
}


def build(name: str, **changes) -> torch.nn.Module:
    folder, encoder, config, sizes = CASES[name]
    try:
        modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    except ImportError:
        pytest.skip(f"this transformers has no {folder}")
    configuration = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    torch.manual_seed(0)
    model = getattr(modeling, encoder)(getattr(configuration, config)(**sizes | changes))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.double()


def run(model: torch.nn.Module, length: int, lengths: list[int] | None = None) -> dict:
    """Outputs, and the gradients of some sum of them: of the input and of all parameters by name."""
    torch.manual_seed(1)
    width = 32 if "T5" in type(model).__name__ else 16
    x = torch.randn(2, length, width, dtype=torch.float64, requires_grad=True)
    mask = [] if lengths is None else [torch.arange(length) < torch.tensor(lengths)[:, None]]
    out = model(x.clone(), *mask).last_hidden_state
    named = {"input": x} | dict(model.named_parameters())
    gradients = torch.autograd.grad((out * torch.randn_like(out)).sum(), list(named.values()), allow_unused=True)
    return {"out": out} | dict(zip(named, gradients, strict=True))


# Granite 5 halves its frames twice: of 52, blocks of 6 see 13. One sample has blocks without a frame.
@pytest.mark.parametrize(
    ("name", "length", "lengths"),
    [
        ("granite", 12, None),
        ("granite", 13, None),
        ("granite", 4, None),
        ("granite plus", 13, None),
        ("granite 5", 48, None),
        ("granite 5", 52, None),
        ("granite 5", 52, [52, 11]),
        ("granite 5", 13, [13, 5]),
        ("speecht5", 13, None),
        ("speecht5", 13, [13, 9]),
        ("speecht5", 4, None),
    ],
)
def test_outputs_and_gradients_are_the_same(name, length, lengths, calls):
    model = build(name, **dict(num_hidden_layers=4) if name == "granite 5" else {})
    wanted = run(model, length, lengths)
    kinds, attributes = [type(part) for part in model.modules()], [vars(part).keys() for part in model.modules()]
    xk.accelerate(model)
    assert_same(run(model, length, lengths), wanted)
    assert len(calls) == (4 if name == "granite 5" else 2)
    assert all(call["mask"] is None or isinstance(call["mask"], xk.RankMask) for call in calls)
    assert (calls[-1]["mask"] is None) == (lengths is None and (name == "speecht5" or length % 6 == 0))
    xk.restore(model)
    assert [type(part) for part in model.modules()] == kinds
    assert [vars(part).keys() for part in model.modules()] == attributes
    assert torch.equal(run(model, length, lengths)["out"], wanted["out"])


def test_rows_are_of_one_head_and_blocks_are_a_batch(monkeypatch):
    """Each block is a sample of the call, and the table is not copied for the heads."""
    seen = []
    operator = xk.integrations.shaw.attend
    monkeypatch.setattr(shaw, "attend", lambda *args, **kwargs: (seen.append(args), operator(*args, **kwargs))[1])
    run(xk.accelerate(build("granite")), 20)
    query, _, _, rel_key, u, v, _ = seen[0]
    assert query.shape == (2 * 4, 4, 6, 8) and rel_key.shape == (4, 11, 8) and rel_key.stride(0) == 0
    assert u is None and v is None


def test_speecht5_makes_no_table_of_pairs():
    model = build("speecht5")
    x = torch.randn(1, 13, 32, dtype=torch.float64)
    shapes = []
    model.embed_positions.register_forward_hook(lambda module, inputs, out: shapes.append(tuple(out.shape)))
    model(x)
    xk.accelerate(model)
    wanted = model(x).last_hidden_state
    layer = model.layers[1].attention
    xk.restore(layer)  # the others take a table of pairs too
    assert_same({"out": model(x).last_hidden_state}, {"out": wanted})
    assert shapes == [(13, 13, 8), (25, 8), (13, 13, 8)]


def test_speecht5_gives_its_maps(calls):
    model = build("speecht5")
    x = torch.randn(1, 13, 32, dtype=torch.float64)
    wanted = model(x, output_attentions=True)
    found = xk.accelerate(model)(x, output_attentions=True)
    assert all(torch.equal(*pair) for pair in zip(found.attentions, wanted.attentions, strict=True)) and not calls


def test_speecht5_decoders_stay_as_they_are(calls):
    torch.manual_seed(0)
    model = transformers.SpeechT5Model(transformers.SpeechT5Config(**SPEECHT5)).double().eval()
    x, y = torch.randn(2, 13, 32, dtype=torch.float64), torch.randn(2, 5, 32, dtype=torch.float64)
    wanted = model(inputs_embeds=None, input_values=x, decoder_input_values=y).last_hidden_state
    xk.accelerate(model)
    assert accelerated(model)["transformers SpeechT5Attention"] == 2
    found = model(input_values=x, decoder_input_values=y, use_cache=True).last_hidden_state
    assert_same({"out": found}, {"out": wanted})
    assert len(calls) == 2


def test_dropout_is_for_training(calls):
    models = build("granite 5", attention_dropout=0.25), build("speecht5", attention_dropout=0.5)
    for model in models:
        for mode in (True, False):
            run(xk.accelerate(model).train(mode), 24)
    assert [call["dropout_p"] for call in calls] == [0.25, 0.25, 0, 0, 0.5, 0.5, 0, 0]


def test_a_layer_compiles():
    """In one graph, for any length; blocks without a frame are filled."""
    model = build("granite 5", subsample_layers=[])
    plain, layer = (block.self_attn for block in model.layers)
    layer.load_state_dict(plain.state_dict())
    compiled = torch.compile(xk.accelerate(layer), fullgraph=True, dynamic=True, backend="eager")
    for length in (13, 16):
        x, mask = torch.randn(2, length, 32, dtype=torch.float64), torch.arange(length) < torch.tensor([[length], [3]])
        found = compiled(x, model.attention_dists, mask)[0]
        assert_same({"out": found}, {"out": plain(x, model.attention_dists, mask)[0]})


@pytest.mark.parametrize("codec", ["NeuCodec", "Xcodec2"])
def test_wav2vec2_bert_inside_a_codec(codec, calls):
    """Its own encoder is found, and the codec gives the same latents."""
    if not hasattr(transformers, f"{codec}Model"):
        pytest.skip(f"this transformers has no {codec}")
    torch.manual_seed(0)
    inner = transformers.Wav2Vec2BertConfig(
        **WAV2VEC2, **LIMITS, feature_projection_input_dim=16, position_embeddings_type="relative_key"
    )
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, head_dim=8)
    sizes |= dict(num_key_value_heads=4, encoder_hidden_size=4, quantization_dim=64, downsampling_ratios=[2, 2])
    sizes |= dict(quantization_levels=[4, 4])
    config = getattr(transformers, f"{codec}Config")(**sizes, semantic_model_config=inner)
    model = getattr(transformers, f"{codec}Model")(config).double().eval()
    inputs = dict(input_values=torch.randn(2, 1, 4 * 13).double(), input_features=torch.randn(2, 13, 16).double())
    inputs["input_features_mask"] = torch.arange(13) < torch.tensor([[13], [9]])
    wanted = model.encode(**inputs, output_latents=True)
    xk.accelerate(model)
    assert accelerated(model)["transformers Wav2Vec2BertSelfAttention"] == 2
    found = model.encode(**inputs, output_latents=True)
    assert len(calls) == 2 and torch.equal(found.audio_codes, wanted.audio_codes)
    assert_same({"latents": found.latents}, {"latents": wanted.latents})


def test_every_stand_in_is_registered():
    assert {name for name, module in STAND_INS.items() if module == "shaw"} == shaw._CLASSES.keys()
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        shaw.Nothing  # noqa: B018
