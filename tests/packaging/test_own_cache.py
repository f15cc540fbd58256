"""Folders of compiled test code: another user's are refused, because their code would be run."""

from __future__ import annotations

import os
import tempfile

import pytest

from lib.own_cache import own_cache


@pytest.fixture(autouse=True)
def temporary(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_of_this_user_is_made_once():
    folder = own_cache("x")
    assert folder == own_cache("x") and folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_write_to_is_refused():
    own_cache("x").chmod(0o777)
    with pytest.raises(PermissionError, match="must be a folder that this user alone can write to"):
        own_cache("x")


def test_a_folder_of_another_user_is_refused(monkeypatch):
    folder, owner = own_cache("x"), os.getuid()
    folder.rename(folder.with_name(f"xlnet-kernels-x-{owner + 1}"))
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(PermissionError):
        own_cache("x")


def test_a_link_is_refused(temporary):
    (temporary / f"xlnet-kernels-x-{os.getuid()}").symlink_to(temporary)
    with pytest.raises(PermissionError):
        own_cache("x")
