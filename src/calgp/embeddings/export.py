"""A `GPClassifier` as one ONNX file that needs no calgp: embeddings in, probabilities and an outlier score out."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from calgp._version import __version__
from calgp.embeddings.prediction import draws
from calgp.gp import Passes
from calgp.posthoc.outliers import find
from calgp.runs.export import Exported, outputs_of, verified
from calgp.runs.writing import wrap_os_errors, write_whole

if TYPE_CHECKING:
    from calgp.embeddings.classifier import GPClassifier

PROBES = 32


class DeployableVectors(nn.Module):
    """Embeddings [N, d] ↦ probabilities, entropies, mutual information, spread, outlier score."""

    def __init__(self, classifier: "GPClassifier", score: str) -> None:
        super().__init__()
        self.classifier, self.kept = classifier, dict[tuple[int, int], Tensor]()
        self.score = classifier.scores_[score] if find(score).reads_features else find(score).fit(*[torch.zeros(1)] * 2)
        classifier._predict(torch.zeros(1, classifier.n_features_in_), self.kept)

    def forward(self, embeddings: Tensor) -> tuple[Tensor, ...]:
        predictive = self.classifier._predict(embeddings, self.kept)
        score = self.score.elementary(self.classifier.inputs_(embeddings), predictive)
        return (*outputs_of(predictive).values(), score.to(embeddings.dtype))


def export_vectors(classifier: "GPClassifier", path: Path, score: str) -> Exported:
    """Write and verify it; a file that differs from Python is not kept."""
    process = classifier.process_
    x = process.basis.inducing[:PROBES].float()  # training rows, and some between and beyond them
    x = x * classifier.inputs_.scale.float() + classifier.inputs_.mean.float()
    x = torch.cat([x, 1.5 * x[:8].flip(0) - 0.5 * x[:8]])
    x = torch.where(torch.tensor(classifier.inputs_.transform == "root"), x.sign() * x.square(), x)
    predictive = classifier.predictive(x.numpy())
    expected = outputs_of(predictive) | {"outlier_score": torch.from_numpy(classifier.outlier_score(x.numpy(), score))}
    metadata = {
        "calgp": __version__,
        "input": {"name": "embeddings", "shape": ["N", classifier.n_features_in_], "type": "float32, as they are"},
        "classes": [str(each) for each in classifier.classes_],
        "outlier_score": score,
        "draws": draws(len(classifier.classes_)),
    }
    module = DeployableVectors(classifier, score).eval()
    wanted = {name: each.float() for name, each in expected.items()}
    step = module.score.step
    data, worst = verified(module, x, wanted, to="onnx", metadata=metadata, name="embeddings", step=step)
    with wrap_os_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    return Exported(path, None, len(data), worst, len(x), Passes(1, "moments"), 0, metadata)
