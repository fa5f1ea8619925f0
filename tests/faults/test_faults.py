"""Fault campaigns: a short form with a fixed seed in every run of the tests, and those that `make faults` runs."""

from functools import partial

import pytest

from faults import elastic_rounds, files, nan_storms, oracles, payloads, soak, strangers
from faults.campaign import Campaign
from faults.campaigns import CAMPAIGNS, SHARES

SHORT = {
    "payloads": (payloads.run, 1500),
    "nan-storms": (nan_storms.run, 40),
    "strangers": (strangers.run, 40),
    "files": (files.run, 20),
    "oracles": (oracles.run, 6),
    "soak": (soak.run, 40),
    # After few steps the loss still falls fast, so that lost rounds show.
    "elastic-rounds": (partial(elastic_rounds.run, kills=3, rounds=40, rest=0.02, tolerance=0.05), 3),
}


@pytest.mark.parametrize("name", SHORT)
def test_a_short_campaign_finds_no_failure(name: str) -> None:
    run, count = SHORT[name]
    campaign = Campaign(name, seed=0, seconds=20.0, count=count)
    run(campaign)
    assert campaign.total >= count and not campaign.failures, campaign.summary()


@pytest.mark.faults
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_campaign_finds_no_failure(name: str) -> None:
    campaign = Campaign(name, seed=0, seconds=480 * SHARES[name] / sum(SHARES.values()))
    CAMPAIGNS[name](campaign)
    assert campaign.total and not campaign.failures, campaign.summary()


def test_a_campaign_counts_and_keeps_failures() -> None:
    campaign = Campaign("files", seed=3, seconds=0.0, count=2)
    drawn = [campaign.random.random() for _ in range(3)]
    while campaign.going():
        campaign.made("cut short")
    campaign.expect(True, "hang", "nothing")
    campaign.expect(False, "hang", "a wait without an end")
    summary = campaign.summary()
    assert summary["faults"] == 2 and summary["kinds"] == {"cut short": 2}
    assert summary["failures"] == {"wrong result": 0, "hang": 1, "orphan": 0, "traceback": 0}
    assert drawn == [Campaign("files", 3, 0.0).random.random() for _ in range(1)] + drawn[1:]
