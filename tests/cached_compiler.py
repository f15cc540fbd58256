"""A C++ compiler command that compiles the same source once: `CACHE=folder REAL=g++ python cached_compiler.py ARGS`.

test_packaging.py installs the package half a dozen times, each time in another folder against another copy of torch's
headers. What counts is the preprocessed text, so objects are kept under its hash, with the folders' names taken out.
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


def main(args):
    real, cache = os.environ["REAL"], Path(os.environ["CACHE"])
    if "-c" not in args or "-o" not in args:  # linking, or a question about the version
        return subprocess.call([real, *args])
    output = Path(args[args.index("-o") + 1])
    maps = [f"-fmacro-prefix-map={folder}=folder{i}" for i, folder in enumerate(folders(args))]
    preprocess = [arg for arg in without(args, "-o") if arg != "-c"]
    # -MMD -MF FILE stay in: ninja reads the dependencies whether or not the object comes from the cache.
    text = subprocess.run([real, *preprocess, *maps, "-E", "-P", "-MT", output], stdout=subprocess.PIPE)
    if text.returncode:
        return text.returncode
    flags = [arg for arg in without(args, "-o", "-MF", "-isystem") if not re.match(r"-I|.*\.cpp$", arg)]
    key = hashlib.sha256(repr((real, flags)).encode() + text.stdout).hexdigest()
    kept = cache / f"{key}.o"
    if not kept.exists():
        code = subprocess.call([real, *args, *maps])
        if code:
            return code
        partial = kept.with_suffix(f".{os.getpid()}")  # renamed when complete: two compilers may run at once
        shutil.copyfile(output, partial)
        partial.replace(kept)
        return 0
    shutil.copyfile(kept, output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
