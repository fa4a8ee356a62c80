"""The sampler yields torch's indices, and goes on from its state in a world of any size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler as TorchSampler

from pycomm.engines.sampler import DistributedSampler
from pycomm.errors import CheckpointError, ConfigError


@given(st.integers(4, 40), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(0, 3))
def test_yields_what_torch_yields(samples, world_size, shuffle, drop_last, epoch) -> None:
    for rank in range(world_size):
        ours = DistributedSampler(range(samples), world_size, rank, shuffle, 5, drop_last)
        theirs = TorchSampler(range(samples), world_size, rank, shuffle, 5, drop_last)
        for each in (ours, theirs):
            each.set_epoch(epoch)
        assert len(ours) == len(theirs)
        assert list(ours) == list(theirs) == list(ours)


@given(st.integers(8, 60), st.integers(1, 4), st.integers(1, 4), st.integers(0, 5))
def test_goes_on_in_another_world(samples, before, after, turns) -> None:
    turns = min(turns, samples // before - 1)
    seen, states = [], []
    for rank in range(before):
        sampler = DistributedSampler(range(samples), before, rank)
        sampler.set_epoch(2)
        indices = iter(sampler)
        seen += [next(indices) for _ in range(turns)]
        states.append(sampler.state_dict())
    assert all(state == states[0] for state in states)
    for rank in range(after):
        sampler = DistributedSampler(range(samples), after, rank)
        sampler.load_state_dict(states[0])
        sampler.set_epoch(2)
        assert len(DataLoader(range(samples), sampler=sampler)) == len(sampler)
        seen += list(sampler)
    assert set(seen) == set(range(samples))
    assert len(seen) < samples + after  # what is twice makes the shares equal


def test_an_iteration_that_is_left_shortens_no_other() -> None:
    sampler, theirs = DistributedSampler(range(7), 2, 0), TorchSampler(range(7), 2, 0)
    next(iter(sampler))
    indices = iter(sampler)
    assert len(sampler) == 4 and [next(indices), len(sampler)] == [next(iter(theirs)), 4]
    assert list(sampler) == list(theirs)
    assert list(sampler) == list(theirs)
    sampler.load_state_dict(sampler.state_dict() | {"used": 4})
    assert len(sampler) == 2 and list(sampler) == list(theirs)[2:]
    assert list(sampler) == list(theirs), "a state is gone on from once"


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="rank in 0..1"):
        DistributedSampler(range(4), 2, 2)
    with pytest.raises(ConfigError, match="too few"):
        DistributedSampler(range(1), 2, 0, drop_last=True)
    sampler = DistributedSampler(range(4), 2, 0)
    with pytest.raises(CheckpointError, match="expected 4 and 0"):
        sampler.load_state_dict({"samples": 5, "seed": 0})
