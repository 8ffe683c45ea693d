import pytest
import torch

from calgp.gp.constants import MOST, constant


@pytest.fixture
def counted():
    """A constant, and a list of what it was made of."""
    made = []

    @constant
    def ones(size: int) -> torch.Tensor:
        made.append(size)
        return torch.ones(size)

    return ones, made


def test_it_is_made_once_for_equal_arguments(counted):
    ones, made = counted
    assert ones(3) is ones(3) and ones(2) is not ones(3)
    assert made == [3, 2]


def test_only_the_last_ones_are_kept(counted):
    """Who may choose the arguments, such as a seed, cannot fill the memory with them."""
    ones, made = counted
    for size in range(MOST + 1):
        ones(size)
    ones(MOST)
    ones(0)
    assert made == [*range(MOST + 1), 0]


def test_it_can_be_trained_with_though_it_was_made_in_inference_mode(counted):
    ones, _ = counted
    with torch.inference_mode():
        assert not ones(3).is_inference()
