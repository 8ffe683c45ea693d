"""A run as one file that needs no calgp: ONNX or torch.export, with its uncertainty.

Monte Carlo dropout does not survive an ordinary export: a Dropout node in training mode is removed by the optimisations
of the run time, and a random node would give other numbers than torch. So nothing is random in the file: it holds the
draws of S samples, those that `Classifier.predict` makes for every image, packed to a bit each.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from calgp._version import __version__
from calgp.data import load
from calgp.errors import CalgpError, name_error
from calgp.gp import Model, Passes, Predictive, draw, freeze, mixes_rows, outputs_seen
from calgp.json_values import Json
from calgp.nets import Task
from calgp.posthoc.calibration import LOWEST, Calibrator
from calgp.runs.evaluation import form
from calgp.runs.record import to_json
from calgp.runs.run_outliers import RunOutliers
from calgp.runs.writing import wrap_os_errors, write_whole

if TYPE_CHECKING:
    from calgp.runs.classifier import Classifier

Target = Literal["onnx", "torch-export"]
SUFFIXES: dict[str, str] = {"onnx": ".onnx", "torch-export": ".pt2"}
OUTPUTS = {
    "probabilities": "[N, Q] p(y | x), calibrated if there is a calibrator",
    "entropy": "[N] of probabilities, in nats",
    "expected_entropy": "[N] of the samples, before calibration",
    "mutual_information": "[N] entropy of the average of samples less expected entropy, before calibration",
    "spread": "[N, Q] standard deviation of the samples' probabilities, before calibration",
}
OUTLIER = "[N] {}: higher is further from what was trained on"
TOLERANCE = 1e-5  # of every output, between the file and torch
METADATA = "calgp.json"  # the extra file of a torch.export archive
OPSET = 18
PROGRAM = Path(__file__).with_name("exported_program.py")


@dataclass(frozen=True)
class Exported:
    """A file that was written and found to agree with torch."""

    path: Path
    program: Path | None  # beside it: predicts image files with it, without calgp
    size: int  # bytes
    worst: dict[str, float]  # the largest difference to torch, by output
    images: int  # that were compared
    passes: Passes
    seed: int
    metadata: Mapping[str, Json]  # what the file tells of itself


class Exportable(nn.Module):
    """Images in [0, 1] ↦ OUTPUTS, and the outlier score if there is one.

    how: which passes it makes. step: how far rounding may move the outlier score.
    """

    how: Passes
    step: float


class Deployable(Exportable):
    """Images in [0, 1] ↦ OUTPUTS: Eq. (10) with a fixed set of S draws, for all images the same.

    The draws are those of row 0, which `Classifier.predict` has for all images.

    Args:
        model: what was trained; it is copied, not changed.
        image: channels, height and width.
        how, seed: as for `predict`.
        calibrator: what the average goes through, if anything.
        outliers: the outlier score of one pass, if any; it reads probabilities before calibration.
    """

    def __init__(
        self,
        model: Model,
        image: tuple[int, int, int],
        *,
        how: Passes,
        seed: int,
        calibrator: Calibrator | None = None,
        outliers: RunOutliers | None = None,
    ) -> None:
        super().__init__()
        if mixes_rows(model):
            raise CalgpError(
                "This network normalises by the moments of the batch (batch_moments): an image alone has no prediction "
                "to export. Train it with backbone.batch_moments=false."
            )
        model = cast(Model, freeze(copy.deepcopy(model).cpu().eval()))
        model.sites()
        self.model, self.calibrator, self.outliers = model, calibrator, outliers
        draws: dict[tuple[int, int], Tensor] = {}  # for the image in row 0, by site and size
        with torch.no_grad():
            _log_probs(model, torch.zeros(1, *image), how, draws, seed)
        self.how = how if draws else replace(how, count=1)
        self.step = 0.0 if outliers is None else outliers.score.step
        self.draws = nn.ModuleDict({f"draw{i}": _pack(z) for i, z in enumerate(draws.values())})
        self.keys = tuple(draws)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        kept = {key: draw() for key, draw in zip(self.keys, self.draws.values(), strict=True)}
        seen, score = [], ()
        with nullcontext() if self.outliers is None else outputs_seen([self.model.features], seen.append):  # type: ignore[list-item]
            predictive = Predictive.of(_log_probs(self.model, images, self.how, kept))
        if self.outliers is not None:
            score = (self.outliers.elementary(seen[-1], predictive).to(images.dtype),)
        if self.calibrator is not None:
            log_p = self.calibrator.transform(predictive.log_probs.double().clamp_min(LOWEST))
            predictive = predictive.calibrated(log_p.to(images.dtype))
        return (*outputs_of(predictive).values(), *score)


def _log_probs(model: Model, x: Tensor, how: Passes, kept: dict[tuple[int, int], Tensor], seed: int = 0) -> Tensor:
    rows = torch.zeros_like(x[:, 0, 0, 0], dtype=torch.long)
    return draw(model, model.stem(x), how.noise(seed, 0, how.count, rows)._replace(kept=kept))


def _pack(z: Tensor) -> nn.Module:
    return Bits(z) if ((z == 0) | (z == 1)).all() else Numbers(z)


class Bits(nn.Module):
    """Masks, eight to a byte."""

    def __init__(self, z: Tensor) -> None:
        super().__init__()
        self.size = z.shape[-1]
        bits = nn.functional.pad(z, (0, -self.size % 8)).unflatten(-1, (-1, 8)).to(torch.uint8)
        self.register_buffer("bytes", (bits << torch.arange(8, dtype=torch.uint8)).sum(-1).to(torch.uint8))
        self.register_buffer("table", (torch.arange(256)[:, None] >> torch.arange(8) & 1).to(z.dtype))
        self.bytes: Tensor
        self.table: Tensor

    def forward(self) -> Tensor:
        return nn.functional.embedding(self.bytes.int(), self.table).flatten(-2)[..., : self.size]


class Numbers(nn.Module):
    """Draws of Gaussians."""

    def __init__(self, epsilon: Tensor) -> None:
        super().__init__()
        self.register_buffer("epsilon", epsilon)
        self.epsilon: Tensor

    def forward(self) -> Tensor:
        return self.epsilon


def export_model(classifier: Classifier, path: Path | None, *, to: Target, how: Passes, seed: int) -> Exported:
    """Write a classifier as one file and check that it gives what torch gives.

    Args:
        classifier: a run of any method, or an ensemble, with its calibrator.
        path: the file; in the run's folder, model.onnx or model.pt2, unless given.
        to: onnx, for ONNX Runtime and others; torch-export, for torch without calgp.
        how, seed: which draws the file holds.
    """
    path = classifier.folder.path / f"model{SUFFIXES.get(to, '')}" if path is None else path
    x, device = _probes(classifier.card.task), next(classifier.model.parameters()).device
    try:
        classifier.model.cpu()
        expected, module = _expected(classifier, x, how, seed), classifier.deployable(how, seed)
        metadata = _metadata(classifier, module.how, seed, scores="outlier_score" in expected)
        data, worst = verified(module, x, expected, to=to, metadata=metadata, step=module.step)
    finally:
        classifier.model.to(device)
    program = path.with_name(f"{path.stem}_predict.py")
    with wrap_os_errors(path.parent):
        write_whole(path, data)
        write_whole(program, PROGRAM.read_bytes())
    return Exported(path, program, len(data), worst, len(x), how, seed, metadata)


def verified(
    module: nn.Module, x: Tensor, expected: dict[str, Tensor], *, to: Target, metadata: Mapping[str, Json],
    name: str = "images", step: float = 0.0,
) -> tuple[bytes, dict[str, float]]:  # fmt: skip
    """The file of a module that takes `name`, and the largest differences of its outputs to what is expected for `x`.

    A file that gives anything else is refused. `step`: how far rounding may move the outlier score beyond that.
    """
    if to not in get_args(Target):
        raise name_error("There is no export to", to, get_args(Target))
    data, run = WRITERS[to](_traced(module, tuple(x.shape[1:])), metadata, name, list(expected))
    try:
        worst = _worst(run, x, expected)
    except Exception as error:
        raise CalgpError(f"The {to} file does not run: {_first(error)}; it was not kept.") from error
    allowed = {name: TOLERANCE + (step if name == "outlier_score" else 0) for name in worst}
    beyond = {name: each - allowed[name] if each == each else math.inf for name, each in worst.items()}
    output = max(beyond, key=lambda name: beyond[name])
    if beyond[output] > 0:
        raise CalgpError(
            f"The {to} file gives another {output} than torch, by {worst[output]:.1e}, more than {allowed[output]:g}; "
            "it was not kept."
        )
    return data, worst


def _expected(classifier: Classifier, x: Tensor, how: Passes, seed: int) -> dict[str, Tensor]:
    """What the classifier predicts, by output."""
    rows = torch.zeros(len(x), dtype=torch.long)
    predictive = Predictive.cat(classifier.predict_batches([(x, rows)], how, seed=seed))
    scores = predictive.outlier_scores
    expected = outputs_of(predictive) | ({} if scores is None else {"outlier_score": scores[:, 0]})
    return {name: each.float() for name, each in expected.items()}


def _metadata(classifier: Classifier, how: Passes, seed: int, *, scores: bool) -> dict[str, Json]:
    """What a file tells of itself: what goes in, what comes out, by what model, and what was fitted on the hold-out."""
    card, task, decisions = classifier.card, classifier.card.task, classifier.fitted_decisions
    probabilities = classifier.calibration and classifier.calibration.probabilities
    threshold = classifier.outlier_threshold if scores else None
    return {
        "calgp": __version__,
        "input": {
            "name": "images",
            "shape": ["N", task.channels, task.height, task.width],
            "preprocessing": "float32 in [0, 1]: 8-bit pixels / 255, channels first, grey or RGB; upright by EXIF, "
            "on white where transparent, stretched to the size by bilinear resampling",
        },
        "outputs": OUTPUTS | ({"outlier_score": OUTLIER.format(classifier.outlier_names[0])} if scores else {}),
        "samples": how.count,
        "engine": how.engine,
        "seed": seed,
        "draws": "of row 0, for all images of a batch the same",
        "method": card.label,
        "network": card.network,
        "trained_on": card.run.source,
        "classes": list(card.classes),
        "calibrator": probabilities and to_json(probabilities),
        "outlier_threshold": threshold and to_json(threshold),
        "decisions": decisions and to_json(decisions),
    }


def _traced(module: nn.Module, image: tuple[int, ...]) -> Any:
    """The module as a graph, for any number of images."""
    try:
        # Python runs as it is, so that anybody's network can be followed
        traced = _exported(module, image, strict=False)
    except Exception as first:
        try:
            traced = _exported(module, image, strict=True)  # Python is read: slower, and cleverer about sizes
        except Exception:
            raise CalgpError(f"This model cannot be exported, since torch cannot trace it: {_first(first)}.") from first
    for node in traced.graph.nodes:  # where in the source it came from: most of a small file, and machine paths
        for name in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            node.meta.pop(name, None)
    return traced


def _exported(module: nn.Module, image: tuple[int, ...], *, strict: bool) -> Any:
    shapes = ({0: torch.export.Dim("N", min=1, max=2**20)},)
    with _quiet(), torch.no_grad():
        return torch.export.export(module, (torch.zeros(3, *image),), dynamic_shapes=shapes, strict=strict)


Runner = Callable[[Tensor], list[Tensor]]


def _as_torch_export(traced: Any, metadata: Mapping[str, Json], name: str, outputs: list[str]) -> tuple[bytes, Runner]:
    file = io.BytesIO()
    with _quiet():
        torch.export.save(traced, file, extra_files={METADATA: json.dumps(metadata)})
        module = torch.export.load(io.BytesIO(file.getvalue())).module()
    return file.getvalue(), lambda x: list(module(x))


def _as_onnx(traced: Any, metadata: Mapping[str, Json], name: str, outputs: list[str]) -> tuple[bytes, Runner]:
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise CalgpError(f"ONNX needs {error.name}, which is not here: pip install 'calgp[export]'.") from None
    with _quiet():
        try:
            program = torch.onnx.export(
                traced, (), dynamo=True, verbose=False, opset_version=OPSET, input_names=[name],
                output_names=outputs,
            )  # fmt: skip
        except Exception as error:
            missing = re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)'", str(error))
            reason = f"ONNX has nothing for {missing[1]}" if missing else _first(error)
            raise CalgpError(f"This model cannot be written as ONNX: {reason}; try --to torch-export.") from error
    assert program is not None  # noqa: S101 (for the type checker)
    proto = program.model_proto
    for part in (proto.graph, *proto.graph.node, *proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        part.ClearField("metadata_props")  # the exporter's own notes: half of a small file
    entry = proto.metadata_props.add()
    entry.key, entry.value = "calgp", json.dumps(metadata)
    data = proto.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])  # default optimisations
    return data, lambda x: [torch.from_numpy(each) for each in session.run(outputs, {name: x.numpy()})]


WRITERS: dict[str, Callable[[Any, Mapping[str, Json], str, list[str]], tuple[bytes, Runner]]] = {
    "onnx": _as_onnx,
    "torch-export": _as_torch_export,
}


def _probes(task: Task) -> Tensor:
    """Images to compare on: noise, and embedded digits in the form of the task, where they can have it."""
    shape = (task.channels, task.height, task.width)
    noise = torch.rand(11, *shape, generator=torch.Generator().manual_seed(0))
    try:
        size, colour = form(task)
    except CalgpError:
        return noise
    return torch.cat([noise, load("digits", "test", size=size, colour=colour).pixels(slice(21))])


def outputs_of(predictive: Predictive) -> dict[str, Tensor]:
    """What a file gives, by name."""
    return {"probabilities": predictive.probs} | {name: getattr(predictive, name) for name in list(OUTPUTS)[1:]}


def _worst(run: Runner, x: Tensor, expected: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference between the file and torch, by output, relative above 1; inputs alone and in batches."""
    found = [torch.cat(parts) for parts in zip(*(run(part) for part in (x[:1], x[1:8], x[8:])), strict=True)]
    pairs = zip(expected.items(), found, strict=True)
    return {name: ((a - b).abs() / b.abs().clamp_min(1)).max().item() for (name, b), a in pairs}


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:300]


@contextmanager
def _quiet() -> Iterator[None]:
    """Torch's exporters warn of what nobody here can mend (a torchvision that is not installed, their own ways)."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
