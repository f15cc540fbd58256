"""Pre-training on real text: factorisation orders, token files, batches and the three objectives."""

from .batches import Batch, PretrainingBatches, batch_loader, with_memory
from .collator import DataCollatorForPermutationLM
from .objective import AutoregressiveLM, MaskedLM, PermutationLM, joint_log_prob
from .orders import block_order, permutation_ranks, sample_spans, span_targets
from .tokens import ByteTokenizer, TokenFile, Vocabulary, write_tokens

__all__ = [
    "AutoregressiveLM",
    "Batch",
    "ByteTokenizer",
    "DataCollatorForPermutationLM",
    "MaskedLM",
    "PermutationLM",
    "PretrainingBatches",
    "TokenFile",
    "Vocabulary",
    "batch_loader",
    "block_order",
    "joint_log_prob",
    "permutation_ranks",
    "sample_spans",
    "span_targets",
    "with_memory",
    "write_tokens",
]
