"""Registry of stand-ins: libraries' classes by name, to avoid imports; registered classes by identity."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Any


@dataclass(frozen=True, eq=False)
class Library:
    """A library, and its classes whose attention `accelerate` replaces.

    name: its usual spelling. package: its name for pip. roots: the first part of the names of its modules.
    least: the first version whose classes fit the stand-ins.
    classes: name of a class (file name and a dot first, where several have the name) -> the module of this package with
        its stand-in, and the models with the class.
    refused: name of a class that has, or seems to have, relative positions -> why it is not supported.
    """

    name: str
    package: str
    roots: tuple[str, ...]
    least: str
    classes: dict[str, tuple[str, str]]
    refused: dict[str, str]

    def name_of(self, cls: type) -> str | None:
        """The key of the class in `classes`, or None."""
        names = (f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}", cls.__name__)
        return next((name for name in names if name in self.classes), None)

    def version(self) -> str | None:
        """Version of the imported library; None where neither it nor pip has one."""
        for root in self.roots:
            version = getattr(sys.modules.get(root), "__version__", None)
            if isinstance(version, str):
                return version
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None

    def check_version(self) -> None:
        """Raise ValueError where the library is older than the first supported version."""
        version = self.version()
        if version is not None and _numbers(version) < _numbers(self.least):
            raise ValueError(
                f"{self.name} {version} cannot be accelerated: version {self.least} or later is needed "
                f"(pip install '{self.package}>={self.least}')"
            )


def _numbers(version: str) -> list[int]:
    """The numbers of a version, for comparisons.

    >>> _numbers("5.18.0.dev0") > _numbers("5.9")
    True
    """
    release = re.match(r"[0-9.]*", version)
    return [int(number) for number in release[0].split(".") if number] if release else []


LIBRARIES = (
    Library(
        "transformers",
        "transformers",
        ("transformers",),
        "5.18",
        {
            "XLNetModel": ("xlnet", "XLNet"),
            "XLNetPreTrainedModel": ("xlnet", "XLNet with a head"),
            "XLNetLayer": ("xlnet", "XLNet"),
            "XLNetRelativeAttention": ("xlnet", "XLNet"),
            "ParakeetEncoderAttention": ("parakeet", "Parakeet, Canary, Cohere ASR, Nemotron-H Omni"),
            "NemotronAsrStreamingEncoderAttention": ("parakeet", "Nemotron ASR and 3.5, streaming"),
            "FastSpeech2ConformerAttention": ("parakeet", "FastSpeech2-Conformer"),
            "Wav2Vec2ConformerSelfAttention": ("parakeet", "Wav2Vec2-Conformer, relative positions"),
            "Wav2Vec2BertSelfAttention": ("parakeet", "Wav2Vec2-BERT, relative positions"),
            "SeamlessM4TConformerSelfAttention": ("parakeet", "SeamlessM4T"),
            "SeamlessM4Tv2ConformerSelfAttention": ("parakeet", "SeamlessM4T v2"),
            "ParakeetEncoder": ("parakeet", "Parakeet's encoder, for its masks"),
            "ParakeetEncoderBlock": ("parakeet", "its layers, for skip_padding"),
            "Wav2Vec2ConformerEncoder": ("parakeet", "Wav2Vec2-Conformer's, for its masks"),
            "Wav2Vec2BertEncoder": ("parakeet", "Wav2Vec2-BERT's, for its masks"),
            "SeamlessM4TConformerEncoder": ("parakeet", "SeamlessM4T's, for its masks"),
            "SeamlessM4Tv2ConformerEncoder": ("parakeet", "SeamlessM4T v2's, for its masks"),
            "GraniteSpeechConformerAttention": ("shaw", "Granite Speech"),
            "GraniteSpeechPlusConformerAttention": ("shaw", "Granite Speech Plus"),
            "GraniteSpeech5EncoderAttention": ("shaw", "Granite Speech 5"),
            "SpeechT5Attention": ("shaw", "SpeechT5, its encoder"),
            "SpeechT5RelativePositionalEncoding": ("shaw", "the same, for its table"),
            "SpeechT5Encoder": ("shaw", "the same, for its table"),
        },
        {
            "Gemma3nAudioAttention": "its scores are capped before the softmax",
            "Gemma4AudioAttention": "its scores are capped before the softmax",
            "FunnelRelMultiheadAttention": "its queries are pooled: a row stands for several positions",
            "the speech encoders above with rotary positions, or none": "they have no relative term",
        },
    ),
    Library(
        "NeMo",
        "nemo-toolkit",
        ("nemo",),
        "2.0",
        {
            "RelPositionMultiHeadAttention": ("nemo", "Conformer, FastConformer"),
            "RelPositionMultiHeadAttentionLongformer": ("nemo", "the same, rel_pos_local_attn"),
            "ConformerEncoder": ("nemo", "their encoder, for its masks"),
            "transformer_encoder.MultiHeadAttention": ("nemo_transformer", "TransformerEncoder, rel_pos"),
            "transformer_encoder.TransformerEncoder": ("nemo_transformer", "the same, for its masks"),
        },
        {},
    ),
    Library(
        "ESPnet",
        "espnet",
        ("espnet", "espnet2"),
        "202301",
        {
            "RelPositionMultiHeadedAttention": ("espnet", "Conformer, (E-)Branchformer"),
            "LegacyRelPositionMultiHeadedAttention": ("espnet", "the same, with zero_triu"),
        },
        {
            "LegacyRelPositionMultiHeadedAttention without zero_triu": "keys ahead get the scores of other queries",
            "RelPositionMultiHeadedAttention of espnet2.asr_transducer": "another class by the same name",
        },
    ),
    Library(
        "SpeechBrain",
        "speechbrain",
        ("speechbrain",),
        "1.0",
        {"RelPosMHAXL": ("speechbrain", "Conformer, Branchformer, Transformer")},
        {},
    ),
    Library(
        "fairseq2",
        "fairseq2",
        ("fairseq2",),
        "0.5",
        {
            "RelativePositionSDPA": ("fairseq2", "Conformer of wav2vec 2.0 and S2T"),
            "ShawRelativePositionSDPA": ("fairseq2", "Conformer of w2v-BERT, Shaw's keys"),
        },
        {"ShawRelativePositionSDPA with use_rel_pos_values": "values have positions too"},
    ),
)


def library_of(cls: type) -> Any:
    """The `Library` that defines the class, or None."""
    root = cls.__module__.partition(".")[0]
    return next((library for library in LIBRARIES if root in library.roots), None)


REGISTERED: dict[type, type] = {}  # class -> stand-in, from `register`


def known_bases(cls: type) -> list[type]:
    """The classes with a stand-in among this class and its bases, nearest first; nothing is imported."""
    return [base for base in cls.__mro__ if base in REGISTERED or _in_library(base)]


def _in_library(base: type) -> bool:
    library = library_of(base)
    return library is not None and library.name_of(base) is not None


def stand_in_of(base: type) -> Any:
    """The stand-in of a class of `known_bases`, imported here for a library's class."""
    if base in REGISTERED:
        return REGISTERED[base]
    library = library_of(base)
    module, _ = library.classes[library.name_of(base)]
    return getattr(importlib.import_module(f".{module}", __package__), base.__name__)
