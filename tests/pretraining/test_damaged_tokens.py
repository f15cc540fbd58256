"""Token files that are damaged, cut or replaced, also while they are open."""

from __future__ import annotations

import io
import os
import pickle
import random
import zlib

import numpy as np
import pytest

from xlnet_kernels.pretraining import TokenFile, token_contents, write_tokens

IDS = np.random.default_rng(0).integers(0, 300, 20_000)  # 40,000 bytes: two blocks and a part of one


@pytest.fixture
def path(tmp_path):
    write_tokens(tmp_path / "text", [IDS[:7], IDS[7:]], 300)
    return tmp_path / "text"


def old(path, ids=IDS) -> None:
    """A file without checksums."""
    file = io.BytesIO()
    for array in (ids.astype(np.uint16), np.array([0, len(ids)]), np.array(300)):
        np.lib.format.write_array(file, array, version=(1, 0))
    path.write_bytes(file.getvalue())


def read_all(path) -> np.ndarray:
    text = TokenFile(path)
    return text.read(0, len(text))


@pytest.mark.parametrize("size", [1, 8191, 8192, 8193, 16384, 20_000])
def test_pieces_of_any_blocks_are_read(size, tmp_path):
    pieces = np.split(IDS[:size], sorted(random.Random(0).choices(range(size + 1), k=5)))
    write_tokens(tmp_path / "text", pieces, 300)
    text = TokenFile(tmp_path / "text")
    text.verify()
    for begin in (0, 1, 4095, 8191, 8192, size - 1):
        for end in (begin, begin + 1, 8192, 8193, size, size + 5, -1, None):
            assert np.array_equal(text.read(begin, end), IDS[:size][begin:end])
    assert len(text._contents.checksums) == -(-2 * size // token_contents.BLOCK)


def test_a_flip_of_any_bit_is_found(path):
    """All of a small file, and some of every block of a larger one."""
    large = path.read_bytes()
    write_tokens(path, [[1, 2, 3], [250, 0], [7]], 260)
    small = path.read_bytes()
    rng = random.Random(0)
    flips = [(small, place, rng.randrange(8)) for place in range(len(small))]
    flips += [(large, rng.randrange(len(large)), rng.randrange(8)) for _ in range(100)]
    for content, place, bit in flips:
        changed = bytearray(content)
        changed[place] ^= 1 << bit
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"text (is|holds) "):
            read_all(path)


def test_damage_of_any_kind_is_a_sentence(path):
    rng, content = random.Random(1), path.read_bytes()
    old(path)
    for whole in (content, path.read_bytes()):
        for _ in range(150):
            changed = bytearray(whole)
            begin, end = rng.choice(((0, 128), (len(whole) - 400, len(whole)), (0, len(whole))))
            for _ in range(rng.choice((2, 5, 50))):
                changed[rng.randrange(begin, end)] = rng.choice(b"\0\xff0123456789(),'{}[]<>u\n")
            path.write_bytes(changed[: rng.choice((len(whole), rng.randrange(len(whole))))])
            try:
                found = read_all(path)
            except (ValueError, OSError) as error:
                assert str(path) in str(error)
            else:  # an old file has nothing to be compared with
                assert whole is not content and found.max() < 300


def test_a_block_is_named_and_others_are_read(path):
    changed = bytearray(path.read_bytes())
    changed[128 + token_contents.BLOCK + 5] ^= 1
    path.write_bytes(changed)
    text = TokenFile(path)
    assert np.array_equal(text.read(0, 8192), IDS[:8192]) and np.array_equal(text.read(16384, None), IDS[16384:])
    for find in (text.verify, lambda: text.part(8000, 9000).read(900, 901)):
        with pytest.raises(ValueError, match="its tokens 8192 to 16384 are not those that were written"):
            find()
    text.part(0, 8192)  # opens, and has no damage where it is read
    text.part(0, 8192).read(0, 8192)


def test_old_files_are_read_but_not_verified(path):
    old(path)
    assert np.array_equal(read_all(path), IDS)
    with pytest.raises(ValueError, match="text has no checksums: write it again with write_tokens"):
        TokenFile(path).verify()


@pytest.mark.parametrize("form", ["new", "old"])
def test_a_file_that_is_cut_while_it_is_open_is_an_error(form, path):
    if form == "old":
        old(path)
    text = TokenFile(path)
    assert text.read(0, 5).tolist() == IDS[:5].tolist()
    os.truncate(path, 20_000)  # a mapped page behind that is SIGBUS
    with pytest.raises(ValueError, match="text was cut while it was open: it ends before byte"):
        text.read(19_000, 19_005)
    os.truncate(path, 0)
    with pytest.raises(ValueError, match="was cut while it was open"):
        text.read(0, 5)


def test_a_file_that_is_overwritten_while_it_is_open_is_an_error(path):
    text = TokenFile(path)
    with open(path, "r+b") as file:
        file.seek(128)
        file.write(bytes(100))
    with pytest.raises(ValueError, match="was changed while it was open: its tokens 0 to 8192"):
        text.read(0, 5)


def test_a_file_that_is_replaced_is_not_mixed_with_its_successor(path):
    text = TokenFile(path)
    sent = pickle.dumps(text.part(2, 9))
    assert np.array_equal(pickle.loads(sent).read(0, None), IDS[2:9])
    write_tokens(path, [IDS[:7], IDS[7:][::-1]], 300)  # as long, with the same bounds
    assert np.array_equal(text.read(0, None), IDS)
    assert np.array_equal(text.part(5, 15_000).read(0, None), IDS[5:15_000])
    assert np.array_equal(text.tokens, IDS)
    with pytest.raises(ValueError, match="text was written again since it was opened: open it again"):
        pickle.loads(sent)


def test_descriptors_are_closed(path):
    count = len(os.listdir("/dev/fd"))
    for _ in range(20):
        TokenFile(path).part(3, 9).read(0, 6)
        path.with_name("bad").write_bytes(b"\x93NUMPY")
        with pytest.raises(ValueError, match="no token file"):
            TokenFile(path.with_name("bad"))
    assert len(os.listdir("/dev/fd")) == count


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name, kind in (("pipe", "a named pipe"), ("zero", "a device"), ("", "a folder")):
        with pytest.raises(ValueError, match=f"must be a file, got {kind}"):
            TokenFile(tmp_path / name)


def test_systems_without_reads_by_position(path, monkeypatch):
    monkeypatch.delattr(os, "pread")
    assert np.array_equal(read_all(path), IDS)


def test_errors_of_the_disk_name_the_file(path, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    text = TokenFile(path)
    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(OSError, match=r"Input/output error: '.*text'"):
        text.read(0, 1)


def test_checksums_are_as_documented(path):
    content, size = path.read_bytes(), token_contents.BLOCK
    with open(path, "rb") as file:
        tokens, _, _, checksums = (np.load(file) for _ in range(4))
        assert file.read() == b""
    data = tokens.tobytes()
    assert checksums[:-1].tolist() == [zlib.crc32(data[at : at + size]) for at in range(0, len(data), size)]
    assert checksums[-1] == zlib.crc32(content[:128] + content[128 + len(data) : -4])
