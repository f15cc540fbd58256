"""torch's private names are used in one file, so that a change in torch is met in one place."""

import re

from tests import ROOT

PRIVATE = re.compile(
    r"\b(?:torch|forward_ad)(?:\.\w+)*\._(?!_)\w+|from torch[\w.]* import .*\b_\w+|from torch[\w.]*\._\w+|_dynamo_\w+"
)


def test_private_names_of_torch_are_in_one_file():
    package = ROOT / "xlnet_kernels"
    found = {path.name for path in package.rglob("*.py") if PRIVATE.search(path.read_text())}
    assert found == {"_torch.py"}
