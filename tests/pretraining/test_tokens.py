"""Token files: what is written is read, whole or not at all."""

from __future__ import annotations

import io
import os
import pickle

import numpy as np
import pytest

from xlnet_kernels.pretraining import ByteTokenizer, TokenFile, Vocabulary, write_tokens

DOCUMENTS = [[1, 2, 3], [], [250, 0], [7]]


@pytest.fixture
def path(tmp_path):
    write_tokens(tmp_path / "text", DOCUMENTS, 260)
    return tmp_path / "text"


@pytest.mark.parametrize(
    "vocab_size, dtype", [(256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.uint32)]
)
def test_what_is_written_is_read_in_the_smallest_dtype(tmp_path, vocab_size, dtype):
    last = np.array([vocab_size - 1])
    write_tokens(tmp_path / "text", [*DOCUMENTS, last], vocab_size)
    text = TokenFile(tmp_path / "text")
    assert isinstance(text.tokens, np.memmap) and text.tokens.dtype == dtype and text.vocab_size == vocab_size
    assert text.read(0, len(text)).tolist() == [1, 2, 3, 250, 0, 7, vocab_size - 1]
    assert text.bounds.tolist() == [0, 3, 5, 6, 7]  # the empty document is left out


def test_numpy_reads_the_tokens(path):
    assert np.load(path, mmap_mode="r").tolist() == [1, 2, 3, 250, 0, 7]


def test_documents_are_taken_as_they_come(tmp_path):
    # more than once around the sizes where .npy headers get another digit
    write_tokens(tmp_path / "text", (np.full(999, index) for index in range(101)), 101)
    text = TokenFile(tmp_path / "text")
    assert len(text) == 100899 and (text.tokens == np.repeat(np.arange(101), 999)).all()


def test_a_part_has_its_own_bounds(path):
    text = TokenFile(path).part(1, 5)
    assert text.read(0, 4).tolist() == [2, 3, 250, 0] and text.bounds.tolist() == [0, 2, 4]
    inner = text.part(2, 3)
    assert len(inner) == 1 and inner.read(0, 1).tolist() == [250] and inner.bounds.tolist() == [0, 1]
    for begin, end in ((0, 5), (2, 2), (-1, 2)):
        with pytest.raises(ValueError, match=r"begin and end must mark tokens of 4, got \["):
            text.part(begin, end)


def test_pickles_hold_the_path_and_not_the_tokens(tmp_path):
    write_tokens(tmp_path / "text", [np.zeros(100000, int)], 5)
    text = TokenFile(tmp_path / "text").part(10, 90000)
    copy = pickle.loads(pickle.dumps(text))
    assert len(pickle.dumps(text)) < 1000 and len(copy) == len(text) and copy.begin == 10
    assert isinstance(copy.tokens, np.memmap)


@pytest.mark.parametrize(
    "document, text",
    [
        ([1, 260], r"documents\[1\] must hold ids in \[0, 260\), got values from 1 to 260"),
        ([-1], r"documents\[1\] must hold ids in \[0, 260\), got values from -1"),
        ([[1], [2]], r"documents\[1\] must be 1-dimensional integers, got int64 of shape \(2, 1\)"),
        ([1.5], r"documents\[1\] must be 1-dimensional integers, got float64"),
    ],
)
def test_a_failed_write_leaves_the_old_file(path, document, text):
    before = path.read_bytes()
    with pytest.raises(ValueError, match=text):
        write_tokens(path, [[5, 5], document], 260)
    assert path.read_bytes() == before and [entry.name for entry in path.parent.iterdir()] == ["text"]


def test_an_interrupted_write_leaves_no_file(tmp_path):
    def documents():
        yield [1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tokens(tmp_path / "text", documents(), 260)
    assert not list(tmp_path.iterdir())


def test_the_old_file_is_replaced_by_a_whole_one_at_once(path, monkeypatch):
    before, replace, seen = path.read_bytes(), os.replace, []

    def watched(source, target):
        seen.append((TokenFile(source).read(0, 2).tolist(), path.read_bytes() == before, target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    write_tokens(path, [[5, 6]], 260)
    assert seen == [([5, 6], True, path)] and TokenFile(path).read(0, 2).tolist() == [5, 6]


def test_nothing_to_write_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="at least one token"):
        write_tokens(tmp_path / "text", [[], []], 260)
    with pytest.raises(ValueError, match=r"vocab_size must be an integer in \[1, 2\^32\], got 0"):
        write_tokens(tmp_path / "text", [[1]], 0)
    with pytest.raises(ValueError, match="vocab_size must be an integer .*, got 2.5"):
        write_tokens(tmp_path / "text", [[1]], 2.5)


def test_a_file_cut_anywhere_is_refused(path):
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="truncated|no token file"):
            TokenFile(path)
    path.write_bytes(whole[:130])
    with pytest.raises(ValueError, match="is truncated: 6 tokens need 140 bytes, the file has 130"):
        TokenFile(path)


def made_of(**arrays) -> bytes:
    """A file with another array in place of one of its three."""
    parts = {"tokens": np.array([1, 2], np.uint8), "bounds": np.array([0, 2]), "vocab_size": np.array(5)} | arrays
    file = io.BytesIO()
    for array in parts.values():
        np.lib.format.write_array(file, array, version=(1, 0))
    return file.getvalue()


@pytest.mark.parametrize(
    "content, text",
    [
        (b"Once upon a time", "does not begin with an .npy header"),
        (b"", "does not begin with an .npy header"),
        ({"tokens": np.zeros(2)}, r"begins with <f8 of shape \(2,\)"),
        ({"tokens": np.zeros((2, 2), np.uint8)}, r"begins with \|u1 of shape \(2, 2\)"),
        ({"tokens": np.zeros(2, ">u2")}, r"begins with >u2"),
        ({"tokens": np.zeros(0, np.uint8)}, "has no tokens"),
        ({"bounds": np.array([0, 1])}, "bounds do not rise from 0 to its 2 tokens"),
        ({"bounds": np.array([0, 0, 2])}, "bounds do not rise"),
        ({"bounds": np.array([0.0, 2.0])}, "has no whole document bounds"),
        ({"vocab_size": np.array(0)}, "vocabulary size is no positive integer"),
        ({"more": np.array(1)}, "bytes follow after its vocabulary size"),
    ],
)
def test_foreign_files_are_refused(path, content, text):
    path.write_bytes(content if isinstance(content, bytes) else made_of(**content))
    with pytest.raises(ValueError, match=text):
        TokenFile(path)


def test_a_plain_npy_file_is_refused(tmp_path):
    np.save(tmp_path / "text.npy", np.zeros(9, np.uint8))
    with pytest.raises(ValueError, match="no whole document bounds"):
        TokenFile(tmp_path / "text.npy")
    with pytest.raises(FileNotFoundError):
        TokenFile(tmp_path / "nothing")


def test_ids_outside_the_vocabulary_are_found_when_read(path):
    whole = made_of(tokens=np.array([1, 2, 9, 3], np.uint8), bounds=np.array([0, 4]))
    path.write_bytes(whole)
    text = TokenFile(path).part(1, 4)
    assert text.read(0, 1).tolist() == [2]
    with pytest.raises(ValueError, match="holds id 9 at token 2, outside its vocabulary of 5"):
        text.read(0, 3)


def test_bytes_come_back():
    tokenizer = ByteTokenizer()
    text = "New York is a city, Größe, 纽约\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and ids.max() < 256
    assert np.array_equal(tokenizer.encode(text.encode()), ids)
    special = tokenizer.vocabulary
    assert tokenizer.decode([special.cls, 72, special.sep, 105]) == "Hi"
    assert special.special.nonzero()[0].tolist() == [256, 257, 258, 259] and len(special.ordinary) == 256


@pytest.mark.parametrize(
    "change, text",
    [
        ({"mask": 10}, r"must lie in \[0, 10\), got \(1, 2, 3, 10\)"),
        ({"others": (-1,)}, "must lie in"),
        ({"cls": 1}, "must all differ"),
        ({"word_starts": np.ones(9, bool)}, r"word_starts must be bool of shape \(10,\), got bool of shape \(9,\)"),
        ({"word_starts": np.ones(10)}, "word_starts must be bool of shape"),
    ],
)
def test_bad_vocabularies_are_named(change, text):
    with pytest.raises(ValueError, match=text):
        Vocabulary(**({"size": 10, "sep": 1, "cls": 2, "pad": 3, "mask": 4} | change))
