"""Tables, headline and pictures of results files.

    python benchmarks/report.py RESULTS.json                              tables, printed as Markdown
    python benchmarks/report.py RESULTS.json PAGE.md                      put into a page
    python benchmarks/report.py RESULTS.json [...] PAGE.md                several runs in one table
    python benchmarks/report.py --headline RESULTS.json [...] [PAGE.md]   in multiples of plain SDPA's time
    python benchmarks/report.py --speedups RESULTS.json [...] [PAGE.md]   whole models against the fastest peer
    python benchmarks/report.py --page RESULTS.json [...] PAGE.md         a page of all their tables
    python benchmarks/report.py --highlights RESULTS.json [README.md]     README's three numbers
    python benchmarks/report.py --counted RESULTS.json [PAGE.md]          beside gpu-counts.json
    python benchmarks/report.py --plot RESULTS.json [PICTURE.png]         drawn; default beside the JSON
    python benchmarks/report.py --summary RESULTS.json [PICTURE.png]      README's picture; default NAME-summary.png

A page has a line `<!-- RESULTS.json [...] -->`, `<!-- speedups RESULTS.json [...] -->`, `<!-- headline -->`,
`<!-- highlights -->` or `<!-- counted -->` for where they begin and `<!-- end -->` for where they end.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from lib import counted, headline, report, speedups
from lib.plot import plot, summary


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 where a file cannot be read or drawn, or a page has no place for the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--headline", action="store_true", help="of runs of attn.py, a line per dtype, head_dim, length, backend"
    )
    what.add_argument("--speedups", action="store_true", help="of runs of models, a line per case and direction")
    what.add_argument("--page", action="store_true", help="of any runs, all tables")
    what.add_argument("--highlights", action="store_true", help="of a run of attn.py, README's three numbers")
    what.add_argument("--counted", action="store_true", help="of a run of attn.py on a GPU, beside what was counted")
    what.add_argument("--plot", action="store_true", help="a picture")
    what.add_argument("--summary", action="store_true", help="of a run of attn.py, README's picture")
    options = parser.parse_args(arguments)
    target = options.files.pop() if len(options.files) > 1 and options.files[-1].suffix != ".json" else None
    if len(options.files) > 1 and (options.highlights or options.plot or options.summary or options.counted):
        parser.error("one results file at a time, but for tables and --headline")
    try:
        runs = [json.loads(path.read_text()) for path in options.files]
        named = {path.stem: run for path, run in zip(options.files, runs, strict=True)}
        if options.plot:
            target = target or options.files[0].with_suffix(".png")
            plot(runs[0], target)
            print(target)
        elif options.summary:
            target = target or options.files[0].with_name(f"{options.files[0].stem}-summary.png")
            summary(runs[0], target)
            print(target)
        elif options.page:
            if target is None:
                parser.error("--page takes results files and a page")
            speedups.page(named, target)
        else:
            text, place = lambda _: report.markdown(report.joined(runs)), " ".join(path.name for path in options.files)
            if options.headline:
                text, place = lambda _: headline.markdown(named), "headline"
            elif options.speedups:
                text, place = lambda _: speedups.table(named), f"speedups {place}"
            elif options.highlights:
                text, place = headline.highlights, "highlights"
            elif options.counted:
                text, place = counted.markdown, "counted"
            if target is None:
                print(text(runs[0]))
            else:
                report.put(target, place, text(runs[0]))
    except (OSError, ValueError, KeyError) as error:
        print(f"{options.files[0]}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
