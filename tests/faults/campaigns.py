"""All campaigns, and how the time is divided between them."""

from faults import (
    disk_full,
    elastic,
    elastic_rounds,
    files,
    limits,
    nan_storms,
    oracles,
    payloads,
    power_cuts,
    processes,
    soak,
    strangers,
)
from faults.campaign import Run

CAMPAIGNS: dict[str, Run] = {
    "payloads": payloads.run,
    "nan-storms": nan_storms.run,
    "files": files.run,
    "power-cuts": power_cuts.run,
    "strangers": strangers.run,
    "disk-full": disk_full.run,
    "oracles": oracles.run,
    "soak": soak.run,
    "processes": processes.run,
    "elastic": elastic.run,
    "elastic-rounds": elastic_rounds.run,
    "limits": limits.run,
}
SHARES = {  # of the time
    "payloads": 4,
    "nan-storms": 1,
    "files": 2,
    "power-cuts": 2,
    "strangers": 1,
    "disk-full": 1,
    "oracles": 1,
    "soak": 2,
    "processes": 5,
    "elastic": 1,
    "elastic-rounds": 2,
    "limits": 1,
}
