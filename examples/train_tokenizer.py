"""Train a tokenizer on text, for AutoTokenizer: byte-level BPE, Unigram as in XLNet, or bytes.

    python examples/train_tokenizer.py --text my-folder --output runs/tokenizer
    python examples/train_tokenizer.py --kind unigram --vocab-size 32000 --text my-folder --output runs/tokenizer

Give the folder to `pretrain.py --tokenizer`; every checkpoint has a copy. Needs pip install '.[examples]'.
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    from rich.console import Console
except ImportError:
    raise SystemExit("train_tokenizer.py needs rich: pip install '.[examples]'") from None

from parts.command import check_output, clear, make_parser, refuse
from parts.corpus import read_documents
from parts.tokenizer import KINDS, train_tokenizer


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 0, or 2 for invalid options."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--text", metavar="PATH", help="a file or a folder; default the manual that comes with Python")
    add("--kind", choices=KINDS, default="bpe", help="bpe keeps every character; unigram collapses white space")
    add("--vocab-size", type=int, default=8000, help="ids in all, special tokens included; bytes have 260")
    add("--output", type=Path, default=Path("runs/tokenizer"), help="folder of the tokenizer")
    add("--overwrite", action="store_true", help="replace the tokenizer in --output")
    options = parser.parse_args(arguments)

    def work() -> None:
        console = Console(highlight=False)
        documents = [text.decode("utf-8") for _, text in read_documents(options.text)]
        if not any(documents):
            raise ValueError(f"--text: {options.text} holds no text")
        check_output(options.output, options.overwrite, {"--text": options.text})
        # By lines, to avoid BPE words across line ends and memory that grows with documents.
        lines = (line for document in documents for line in document.splitlines(keepends=True))
        made = train_tokenizer(options.kind, lines, options.vocab_size, show_progress=console.is_terminal)
        clear(options.output, ("tokenizer.json", "tokenizer_config.json"))
        made.save(options.output)
        size = sum(len(text.encode()) for text in documents)
        tokens = sum(len(made.encode(text.encode())) for text in documents)
        console.print(
            f"{made.vocabulary.size:,} ids; {len(documents):,} documents of {size:,} bytes are {tokens:,} tokens, "
            f"{size / tokens:.2f} bytes each",
            soft_wrap=True,
        )

    return refuse("train_tokenizer.py", work)


if __name__ == "__main__":
    sys.exit(main())
