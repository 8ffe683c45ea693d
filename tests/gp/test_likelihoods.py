import numpy as np
import pytest
import torch

import reference
from calgp.gp import Latent, Softmax


def latent(samples=4, n=5, classes=3, *, scale=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return Latent(scale * torch.randn(samples, n, classes, generator=generator, dtype=dtype))


def test_log_probs_equal_numpys_softmax():
    f = latent()
    np.testing.assert_allclose(Softmax().log_probs(f).exp(), reference.softmax(f.mean.numpy()), rtol=1e-13)


def test_expected_log_prob_is_the_average_over_samples_of_the_labels_log_probability():
    f, y = latent(), torch.tensor([0, 2, 1, 1, 0])
    p = reference.softmax(f.mean.numpy())
    expected = [np.mean([np.log(p[s, i, y[i]]) for s in range(4)]) for i in range(5)]
    np.testing.assert_allclose(Softmax().expected_log_prob(f, y), expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_extreme_logits_stay_finite_and_sum_to_one(dtype):
    f = torch.tensor([[[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [1e4, 1e4, -1e4], [3e4, 0.0, 0.0]]], dtype=dtype)
    log_probs = Softmax().log_probs(Latent(f))
    assert log_probs.isfinite().all()
    np.testing.assert_allclose(log_probs.double().exp().sum(-1), 1, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)
    assert Softmax().expected_log_prob(Latent(f), torch.tensor([1, 0, 2, 2])).isfinite().all()
    assert log_probs[0, 0, 1].item() == pytest.approx(-2e4, rel=1e-2)  # log space: not log 0


def test_gradients_at_extreme_logits_are_finite():
    f = torch.tensor([[[1e4, -1e4, 0.0]]], requires_grad=True)
    Softmax().expected_log_prob(Latent(f), torch.tensor([1])).sum().backward()
    torch.testing.assert_close(f.grad, torch.tensor([[[-1.0, 1.0, 0.0]]]))  # one-hot less softmax
