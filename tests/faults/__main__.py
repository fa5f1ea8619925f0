"""The fault campaigns: `make faults`, or `make faults ARGS="payloads --count 1000000 --seed 1"`."""

import argparse
import json
import os
import sys
from pathlib import Path

import spawn
from faults.campaign import Campaign
from faults.campaigns import CAMPAIGNS, SHARES


def main() -> int:
    """Run campaigns one after the other; the exit status is 1 if any failed."""
    parser = argparse.ArgumentParser(prog="make faults", description="Run fault campaigns, and write their counts.")
    parser.add_argument("campaigns", nargs="*", metavar="CAMPAIGN", help=f"of {', '.join(CAMPAIGNS)}; default: all")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all campaigns together (default: 8)")
    parser.add_argument("--count", type=int, help="faults of each campaign, whatever the time")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: 0)")
    parser.add_argument("--output", type=Path, default=Path("faults"), help="folder of the summaries (default: faults)")
    options = parser.parse_args()
    if unknown := set(options.campaigns) - set(CAMPAIGNS):
        parser.error(f"there is no campaign {', '.join(sorted(unknown))}; choose from {', '.join(CAMPAIGNS)}")
    spawn.preload()
    failed = 0
    chosen = options.campaigns or list(CAMPAIGNS)
    whole = sum(SHARES[name] for name in chosen)
    for name in chosen:
        seconds = 60 * options.minutes * SHARES[name] / whole
        campaign = Campaign(name, options.seed, seconds, options.count, folder=options.output)
        CAMPAIGNS[name](campaign)
        campaign.facts["command"] = f"make faults ARGS={' '.join(sys.argv[1:])!r}"
        campaign.facts["NUMBA_BOUNDSCHECK"] = os.environ.get("NUMBA_BOUNDSCHECK", "0")
        path = campaign.write(options.output)
        print(f"{name}: {campaign.total} faults, {len(campaign.failures)} failures ({path})", flush=True)
        for failure in campaign.failures[:5]:
            print(json.dumps(failure), flush=True)
        failed += bool(campaign.failures)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
