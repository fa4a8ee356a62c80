"""A slow rank told from a slow link, and the link's rate in the verdict: between two hosts of this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from pycomm.launch.two_hosts import TwoHosts, unavailable
from warm_python import warm_python

REASON = unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
JOB = Path(__file__).parent / "jobs" / "slow_link.py"
SAYS = r"everyone has entered all_reduce #\d+ on group 'world', but the link (0->1|1->0) moves ([\d.]+) MB/s"


def test_a_slow_rank_and_a_slow_link_are_told_apart_and_the_verdict_has_the_links_rate() -> None:
    with TwoHosts(rate="1gbit") as hosts:
        environ = {**os.environ, "PYCOMM_HANG_S": "0.4"}
        processes = hosts.start_job([warm_python(), str(JOB)], (1, 1), environ, stdout=subprocess.PIPE, text=True)
        printed = [process.communicate(timeout=900)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), printed
    found = [json.loads(text.splitlines()[-1]) for text in printed]
    assert found[0]["reports"] == [[1], [], True], found
    for report in found:
        rates = [float(match[2]) for text in report["hangs"] if (match := re.search(SAYS, text))]
        assert rates and max(rates) > 0 and all(rate < 5 for rate in rates), report  # 20 Mbit/s are 2.5 MB/s
