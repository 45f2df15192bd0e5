"""`./run bench`: measures this service on this machine, scenario by scenario.

    ./run bench [SCENARIO …] [--out FOLDER] [--rows 0,1000000,10000000]
    ./run bench --smoke          that it runs and that ratios hold, in under a minute
    ./run bench engine …         the outbound HTTP engine against others

Each scenario writes JSON, a Markdown table and a plot. What the bench itself costs stands in its tables.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from bench import engine, machine, scale
from bench.scenarios import ALL, SMOKE
from bench.stand import standing

OUT = Path("bench-results")


def main() -> int:
    """Run what was asked for; 1 when a relation did not hold."""
    if sys.argv[1:2] == ["engine"]:
        engine.main(sys.argv[2:])
        return 0
    options = _options()
    about = machine.about()
    failed: list[str] = []
    said: list[str] = []
    with standing() as stand:
        for name in options.scenarios or (SMOKE if options.smoke else ALL):
            before_ms = machine.speed_ms()
            report = ALL[name](stand, options.scale)
            report.speed_ms = [before_ms, machine.speed_ms()]
            said.append(report.summary)
            failed += [check.sentence for check in report.checks if not check.held]
            if options.out is not None:
                report.write(options.out, about)
            print(report.as_markdown(about), flush=True)
    if failed:
        print("Not held: " + "; ".join(failed))
        return 1
    print("Every relation held: " + "; ".join(said) + ".")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./run bench", description="Measure Hookledger on this machine.")
    parser.add_argument("scenarios", nargs="*", choices=[*ALL, []], metavar="SCENARIO", help=", ".join(ALL))
    parser.add_argument("--smoke", action="store_true", help="that it runs and that ratios hold, in under a minute")
    parser.add_argument("--out", type=Path, help=f"where JSON, Markdown and PNG go; {OUT} but for --smoke")
    parser.add_argument("--rows", help="of `growth`: numbers of finished deliveries, separated by commas")
    options = parser.parse_args()
    options.scale = scale.SMOKE if options.smoke else scale.Scale()
    if options.rows:
        options.scale = replace(options.scale, finished_rows=tuple(int(count) for count in options.rows.split(",")))
    if options.out is None and not options.smoke:
        options.out = OUT
    return options


if __name__ == "__main__":
    sys.exit(main())
