"""Every pair of features of a call on interpreted backends, which other files ask for fewer combinations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cases import INTERPRETED
from tests.machine.features import CHOICES, pairwise

# On a GPU alone do architectures and TF32 differ.
FEATURES = dict.fromkeys(replace(features, architecture=80, tf32=False) for features in pairwise())


def test_every_pair_is_there():
    names = [name for name in CHOICES if name not in ("architecture", "tf32")]
    found = {(a, getattr(one, a), b, getattr(one, b)) for one in FEATURES for a in names for b in names}
    wanted = {(a, x, b, y) for a in names for b in names if a != b for x in CHOICES[a] for y in CHOICES[b]}
    assert wanted <= found


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("backend", INTERPRETED)
def test_every_pair_of_features(backend, features):
    features = features.serves(backend)
    features.check(backend, features.problem(0, rows=40))
