"""Groups of NPUs: what each rank's process sees, and errors that other ranks may have caused."""

from __future__ import annotations

import pytest

from torch_pagoda.runtime.parallel.device_group import DeviceGroup, environment_of, exchanging, visible_devices
from torch_pagoda.runtime.parallel.group import CollectiveFailed


@pytest.mark.parametrize(
    ("environment", "count", "expected"),
    [
        ({}, 3, ["0", "1", "2"]),
        ({"ASCEND_RT_VISIBLE_DEVICES": "6, 3,1"}, 3, ["6", "3", "1"]),
        ({"ASCEND_RT_VISIBLE_DEVICES": ""}, 2, ["0", "1"]),
    ],
)
def test_each_rank_sees_one_of_the_devices_that_the_user_names(
    environment: dict[str, str], count: int, expected: list[str]
) -> None:
    devices = visible_devices(count, environment)
    assert devices == expected
    assert environment_of(1, devices) == {"ASCEND_RT_VISIBLE_DEVICES": expected[1]}
    assert environment_of(1, []) == {}


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        ("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3214", CollectiveFailed),
        ("EI0002: the wait of devices timed out", CollectiveFailed),
        ("an operator failed, error code is 507015", RuntimeError),
    ],
)
def test_errors_of_exchanges_may_come_from_other_ranks(told: str, kind: type[RuntimeError]) -> None:
    group = DeviceGroup.__new__(DeviceGroup)
    group.rank = 1
    with pytest.raises(RuntimeError) as raised, exchanging(group):
        raise RuntimeError(told)
    assert type(raised.value) is kind
    with pytest.raises(RuntimeError, match="other"), exchanging(object()):
        raise RuntimeError("other")
