"""A C++ compiler command that compiles the same source once: `CACHE=folder REAL=g++ python cached_compiler.py ARGS`.

It compiles without optimisation, in a fraction of the time.

test_install.py installs the package again and again, each time in another folder against another copy of the same
torch. What counts is our own text and the flags, torch's version among them, so objects are kept under their hash.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

FOLDERS = re.compile(r"-(?:I|isystem)\s*(.*)")


def folders(args):
    """Folders that the command names: they show up in __FILE__, which torch's checks put into the code."""
    found = [FOLDERS.match(arg)[1] for arg in args if FOLDERS.match(arg)]
    found += [value for flag, value in zip(args, args[1:], strict=False) if flag == "-isystem"]
    found += [os.path.dirname(arg) for arg in args if arg.endswith(".cpp")]
    return [folder for folder in dict.fromkeys(found) if folder]


def without(args, *flags_with_value):
    """The arguments less those flags and their values."""
    kept, skip = [], False
    for arg in args:
        if not skip and arg not in flags_with_value:
            kept.append(arg)
        skip = not skip and arg in flags_with_value
    return kept


def digest(real, args, source):
    """A digest of the compiler, the flags that name no folder, the source and all headers of its csrc."""
    flags = [arg for arg in without(args, "-o", "-MF", "-isystem") if not re.match(r"-I|.*\.cpp$", arg)]
    key = hashlib.sha256(repr((real, source.name, flags)).encode() + source.read_bytes())
    root = next((folder for folder in source.parents if folder.name == "csrc"), source.parent)
    for header in sorted(path for path in root.rglob("*") if path.suffix in (".h", ".cuh")):
        key.update(repr(header.relative_to(root).as_posix()).encode() + header.read_bytes())
    return key.hexdigest()


def main(args):
    real, cache = os.environ["REAL"], Path(os.environ["CACHE"])
    if "-c" not in args or "-o" not in args:  # linking, or a question about the version
        return subprocess.call([real, *args])
    output, (source,) = Path(args[args.index("-o") + 1]), [Path(arg) for arg in args if arg.endswith(".cpp")]
    kept = cache / f"{digest(real, args, source.resolve())}.o"
    if kept.exists():  # without a list of headers (-MF), which ninja takes for an empty one
        shutil.copyfile(kept, output)
        return 0
    places = [f"-fmacro-prefix-map={folder}=folder{number}" for number, folder in enumerate(folders(args))]
    code = subprocess.call([real, *args, "-O0", *places])
    if code == 0:
        partial = kept.with_suffix(f".{os.getpid()}")  # renamed when complete: two compilers may run at once
        shutil.copyfile(output, partial)
        partial.replace(kept)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
