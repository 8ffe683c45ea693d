import numpy as np
import pytest
import torch
from torch import nn

from calgp.data import load
from calgp.errors import CalgpError
from calgp.gp import Bound
from calgp.nets import BACKBONES
from calgp.runs import RunFolder
from calgp.runs.build import build
from calgp.runs.description import from_json
from calgp.runs.failures import Interrupted
from calgp.training import train_run
from calgp.training.defaults import task_of
from calgp.training.loop import fit, make_optimiser
from calgp.training.muon import COEFFICIENTS, ITERATIONS, MOMENTUM, TURN, Muon, orthogonalised

G = torch.Generator().manual_seed(0)


@pytest.mark.parametrize("shape", [(8, 27), (27, 8), (16, 16)])
def test_the_iteration_acts_on_singular_values_alone(shape):
    """x → a x + b x³ + c x⁵ on each, in NumPy, of the matrix divided by its Frobenius norm."""
    matrix = torch.randn(shape, generator=G, dtype=torch.float64).numpy()
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.linalg.norm(matrix)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        values = a * values + b * values**3 + c * values**5
    np.testing.assert_allclose(orthogonalised(torch.tensor(matrix)).numpy(), left * values @ right, atol=1e-12)


def test_a_step_is_the_formula_for_filters_and_adams_for_the_rest():
    filters, bias = (torch.randn(shape, generator=G, dtype=torch.float64) for shape in ((6, 3, 2, 2), (5,)))
    ours = [nn.Parameter(filters.clone()), nn.Parameter(bias.clone())]
    theirs = nn.Parameter(bias.clone())
    muon, adam = Muon(ours, lr=0.01), torch.optim.Adam([theirs], lr=0.01)
    weight, momentum, length = filters.numpy().reshape(6, 12), np.zeros((6, 12)), np.linalg.norm(filters.numpy())
    for _ in range(3):
        gradient = torch.randn(6, 3, 2, 2, generator=G, dtype=torch.float64)
        ours[0].grad, ours[1].grad = gradient.clone(), gradient[0].flatten()[:5].clone()
        theirs.grad = ours[1].grad.clone()
        muon.step()
        adam.step()
        plain = gradient.numpy().reshape(6, 12)
        momentum = MOMENTUM * momentum + plain
        direction = orthogonalised(torch.tensor(plain + MOMENTUM * momentum)).numpy()
        weight = weight - TURN * 0.01 * length * direction / np.linalg.norm(direction)
        weight = weight * length / np.linalg.norm(weight)
        assert ours[0].grad.equal(gradient)  # as it was
    np.testing.assert_allclose(ours[0].detach().numpy().reshape(6, 12), weight, rtol=1e-10)
    assert ours[1].equal(theirs)


def test_filters_without_a_gradient_stay():
    still, moved = nn.Parameter(torch.ones(2, 1, 1, 1)), nn.Parameter(torch.ones(2, 1, 1, 1))
    moved.grad = torch.tensor([1.0, 0]).view(2, 1, 1, 1)
    Muon([still, moved], lr=0.01).step()
    assert still.equal(torch.ones(2, 1, 1, 1)) and not moved.equal(still)
    moved.grad = torch.zeros(2, 1, 1, 1)
    Muon([moved], lr=0.01).step()
    assert moved.isfinite().all()


def test_it_is_the_default_of_compact_and_refused_without_batch_norm():
    assert (
        from_json({"backbone": "compact"}).optimiser == "muon" and from_json({"backbone": "lenet"}).optimiser == "adam"
    )
    assert from_json({}).optimiser is None  # the images choose the network
    assert from_json({"backbone": "compact", "optimiser": "adam"}).optimiser == "adam"
    assert [name for name, each in BACKBONES.items() if each.scale_free] == ["compact"]
    with pytest.raises(CalgpError, match="optimiser=muon: lenet has convolutions without batch norm; must be adam"):
        from_json({"backbone": "lenet", "optimiser": "muon"})


def filters_after_a_step(fabric, images, kl_weight):
    run = from_json({
        "backbone": {"kind": "Compact", "widths": [4, 8]}, "steps": 1, "kl_weight": kl_weight, "batch_size": 50,
        "schedule": "constant", "learning_rate": 0.02, "augment": [],
    })  # fmt: skip
    model = build(run, task_of(images))
    started = [each.detach().clone() for each in model.parameters() if each.ndim == 4]
    bound, optimiser = fabric.setup(Bound(model, len(images)), make_optimiser(run, model))
    assert len(list(fit(bound, optimiser, images, run, fabric=fabric))) == 1
    return started, [each.detach() for each in model.parameters() if each.ndim == 4]


def test_the_cost_of_filters_does_not_turn_them(fabric):
    """It falls with their length alone, which batch norm undoes and a step keeps."""
    images = load("digits", "train").balanced(50, 0)
    started, free = filters_after_a_step(fabric, images, 0.0)
    _, costly = filters_after_a_step(fabric, images, 1000.0)
    for before, one, other in zip(started, free, costly, strict=True):
        turned = (one - before).norm()
        assert turned > 0.05 * before.norm()
        assert (one - other).norm() < 0.01 * turned  # rounding; with the part along W they would be unlike each other


def test_an_interrupted_training_goes_on_to_the_same_bits(tmp_path, fabric):
    backbone = {"kind": "Compact", "widths": [4, 8]}
    run = from_json({"source": "digits", "train_size": 100, "steps": 6, "backbone": backbone, "holdout": 0.0})
    whole = train_run(run, RunFolder(tmp_path / "whole"), fabric)

    def interrupt(step):
        if step.step == 3:
            raise KeyboardInterrupt

    with pytest.raises((Interrupted, KeyboardInterrupt)):
        train_run(run, RunFolder(tmp_path / "halves"), fabric, watch=interrupt)
    halves = train_run(run, RunFolder(tmp_path / "halves"), fabric, resume=True)
    first, second = whole.model.state_dict(), halves.model.state_dict()
    assert all(first[key].equal(second[key]) for key in first)
