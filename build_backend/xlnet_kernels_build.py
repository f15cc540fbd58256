"""PEP 517 backend: setuptools, building against the torch of the target environment.

The fast path's ABI is that of the torch it is compiled with. In `[build-system] requires`, torch would be downloaded
again for every build, in its newest version; without it, the isolated build would have no torch. So this backend adds
the environment's own site-packages to the path, after the isolated build's packages. It requires torch only if the
environment has none and there is something to compile.
"""

import os
import site
import sys
import sysconfig

from setuptools import build_meta

from build_decisions import TORCH_REQUIREMENT, extension_decision, torch_version


def environment_paths():
    """The site-packages folders of the running interpreter's environment, even if hidden by pip."""
    paths = [*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    # Because pip hides the user's folder from isolated builds. An environment with the base interpreter's packages (no
    # virtual environment, or one with --system-site-packages) has that folder too.
    if sys.base_prefix in site.PREFIXES:
        paths.insert(0, site.getusersitepackages())
    return list(dict.fromkeys(path for path in paths if os.path.isdir(path)))


def add_environment():
    for path in environment_paths():
        if path not in sys.path:  # without isolation already present
            # Not sys.path.append, because torch may come from .pth files.
            site.addsitedir(path)


add_environment()


def _requirements():
    if torch_version() is None and extension_decision().build:
        return [TORCH_REQUIREMENT]
    return []


def get_requires_for_build_wheel(config_settings=None):
    return _requirements()


def get_requires_for_build_editable(config_settings=None):
    return _requirements()


def get_requires_for_build_sdist(config_settings=None):
    return []


build_sdist = build_meta.build_sdist
build_wheel = build_meta.build_wheel
build_editable = build_meta.build_editable
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable
