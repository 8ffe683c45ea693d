"""Commands for pretrained networks: embed (images to vectors), fit (vectors to a classifier), classify (new images)."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from calgp.cli.shared import (
    AddressOption,
    DataOption,
    DeviceOption,
    EscapeOption,
    JsonOption,
    ShardEngineOption,
    ShardGpusOption,
    ShardJobsOption,
    ThreadsOption,
    check_sampling,
    open_fabric,
    out,
)
from calgp.errors import path_error

if TYPE_CHECKING:
    from calgp.cli.fit_embeddings import FitResult
    from calgp.data.original import OriginalImages
    from calgp.embeddings.embed import EmbedOptions
    from calgp.nets.pretrained import FeatureExtractor
    from calgp.search.engines import Engine

NetworkOption = Annotated[
    str, typer.Option(help="timm:NAME, torchvision:NAME, transformers:FOLDER, or file.py:function for your own.")
]
WeightsOption = Annotated[
    str | None,
    typer.Option(
        help="A .safetensors file or a PyTorch state dict; `random` for none.",
        show_default="downloaded by the library; those that file.py:function gives",
    ),
]
FeaturesOption = Annotated[
    str | None,
    typer.Option(help="The module whose output is used as features.", show_default="what enters the last layer"),
]
WorkersOption = Annotated[
    int | None, typer.Option(help="Processes that decode images.", show_default="$CALGP_WORKERS, else 2")
]


def embed(
    network: NetworkOption,
    source: Annotated[str, typer.Option(help="folder:PATH, shards:PATH, or an image set such as cifar10.")],
    folder: Annotated[Path, typer.Option("--out", help="The folder of embeddings.")],
    weights: WeightsOption = None,
    split: Annotated[Literal["train", "val", "test", "all"], typer.Option(help="Which images.")] = "all",
    features: FeaturesOption = None,
    batch_size: Annotated[int, typer.Option(help="Images at a time.")] = 50,
    rows_per_shard: Annotated[
        int, typer.Option(help="Images in each file; an interruption loses at most one file.")
    ] = 1000,
    skip_unreadable: Annotated[bool, typer.Option("--skip-unreadable", help="Leave out damaged images.")] = False,
    data: DataOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    workers: WorkersOption = None,
    jobs: ShardJobsOption = None,
    engine: ShardEngineOption = "local",
    address: AddressOption = None,
    gpus: ShardGpusOption = 0.0,
) -> None:
    """Run a pretrained network once over images, and keep its features as embeddings.

    Size, mean, deviation and interpolation are those of the network itself. Ctrl-C loses at most one file of the
    embeddings: the same command goes on where it was, and ends with the same bytes. --jobs 4 makes four files at a
    time; --engine ray makes them on a Ray cluster, whose machines must see the same folders, and where a process that
    dies is replaced. Each of these has one thread: the bytes are those of --threads 1.

    Example: calgp embed --network timm:resnet18 --source folder:photos --out embeddings
    """
    from calgp.data.original import open_original
    from calgp.embeddings.embed import EmbedOptions
    from calgp.nets.pretrained import find_network
    from calgp.search.engines import find_engine

    options = EmbedOptions(batch_size, rows_per_shard, workers, device)
    places = find_engine(engine, jobs=jobs, address=address, gpus=gpus)
    fabric = open_fabric(device, "32-true", threads)
    extractor = find_network(network, weights, features=features).to(fabric.device)
    images = open_original(
        source, split, colour=extractor.preprocessing.colour, directory=data, skip_unreadable=skip_unreadable
    )
    _embed(extractor, images, folder, source, split, options, places)
    out.print(f"Next: calgp fit {folder} --out model.safetensors", soft_wrap=True)


def _embed(
    extractor: "FeatureExtractor", images: "OriginalImages", folder: Path, source: str, split: str,
    options: "EmbedOptions", engine: "Engine",
) -> None:  # fmt: skip
    """Run the network, with a bar, over what the folder does not have yet."""
    from calgp.cli import bars
    from calgp.embeddings.embed import embed as run_network

    with bars.bar(f"{extractor.name} over {len(images):,} images of {source}") as advance:
        done = run_network(
            extractor, images, folder, source=source, split=split, options=options, engine=engine, watch=advance
        )
    out.print(
        f"{folder} has {done.rows:,} embeddings of {done.width:,} numbers, {len(done.classes)} classes, from images of "
        f"{done.preprocessing.size} pixels.",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


FitOutOption = Annotated[
    Path, typer.Option("--out", help="The run folder, with a report; or a .safetensors file, the classifier alone.")
]
EmbeddingsArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="EMBEDDINGS",
        help="A folder of `calgp embed`, or .npz, .npy, .safetensors, .parquet with X and y; with --network, the "
        "folder to make.",
        show_default="with --network, beside --out, named by network and images",
    ),
]
HoldoutOption = Annotated[
    float, typer.Option(help="Share of the rows kept for `calgp calibrate` and `calgp decide`; of a run folder.")
]
PredictionsOption = Annotated[
    Path | None, typer.Option(help="Write the tested probabilities here, for `calgp judge`.", show_default="none")
]
FirstNetworkOption = Annotated[
    str | None, typer.Option(help="Embed images by this network first, as `calgp embed` does.", show_default="none")
]
FirstSourceOption = Annotated[
    str | None, typer.Option(help="The images for --network, such as folder:photos.", show_default="none")
]


def fit(
    model: FitOutOption,
    embeddings: EmbeddingsArgument = None,
    test: Annotated[
        Path | None,
        typer.Option(help="Embeddings to test on.", show_default="a fifth of the rows"),
    ] = None,
    holdout: HoldoutOption = 0.0,
    predictions: PredictionsOption = None,
    network: FirstNetworkOption = None,
    source: FirstSourceOption = None,
    weights: Annotated[
        str | None, typer.Option(help="Weights for --network.", show_default="as of `calgp embed`")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed that chooses the test rows.")] = 0,
    data: DataOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Fit a Gaussian process classifier on embeddings; it needs no other option.

    With --network, the embeddings are kept: fitting again on the same images does not run the network again.

    Into a run folder: a fifth of the rows (or --test) tests it, and report.html shows how good it is; `calgp evaluate`,
    `calibrate`, `decide`, `report`, `compare` and `export` take the folder. Into a .safetensors file: the same, then
    all rows are used.

    Example: calgp fit --network timm:resnet18 --source folder:photos --out runs/photos
    """
    from calgp.cli.fit_embeddings import check_fit, check_predictions_name, fit_and_test, write_predictions
    from calgp.embeddings.run import check_new

    check_sampling(None, seed)
    folder = model.suffix != ".safetensors"
    check_fit(embeddings, network, source, holdout, predictions, folder=folder)
    if predictions is not None:
        check_predictions_name(predictions)
    open_fabric("cpu", "32-true", threads)
    if folder:
        check_new(model)  # before the network runs
    if network is not None and source is not None:
        embeddings = _embedded(network, source, weights, embeddings, model.parent, data)
    assert embeddings is not None  # noqa: S101  (check_fit has seen to it)
    if folder:
        return _fit_folder(model, embeddings, test, holdout=holdout, seed=seed)
    result = fit_and_test(embeddings, test, seed=seed)
    result.classifier.save(model, made_by=result.made_by)
    if predictions is not None:
        write_predictions(result, predictions)
    for sentence in _summary(result, model, predictions):
        out.print(sentence, soft_wrap=True, highlight=False)


def _embedded(
    network: str, source: str, weights: str | None, folder: Path | None, beside: Path, data: Path | None
) -> Path:
    """The folder of a source's embeddings, made now as far as it is not there."""
    from calgp.data.original import open_original
    from calgp.embeddings.embed import EmbedOptions, cache_name
    from calgp.nets.pretrained import find_network
    from calgp.search.engines import SerialEngine

    extractor = find_network(network, weights)
    images = open_original(source, colour=extractor.preprocessing.colour, directory=data)
    folder = beside / cache_name(extractor, images, source) if folder is None else folder
    _embed(extractor, images, folder, source, "all", EmbedOptions(), SerialEngine())
    return folder


def _fit_folder(path: Path, embeddings: Path, test: Path | None, *, holdout: float, seed: int) -> None:
    """Fit, evaluate and report, and say what was done."""
    from calgp.cli import tables
    from calgp.embeddings.cache import read_manifest
    from calgp.embeddings.run import fit_folder
    from calgp.report.words import THIN, summary

    made_by = read_manifest(embeddings).made_by if embeddings.is_dir() else None
    run = fit_folder(path, embeddings, test, holdout=holdout, seed=seed, made_by=made_by)
    found = run.evaluate()
    page = run.report()
    out.print(tables.evaluation_table(found))
    rows, width = run.card.train_images, run.card.task.height
    out.print(
        f"Fitted a Gaussian process on {rows:,} embeddings of {width:,} numbers, {len(run.classes)} classes: {path}",
        soft_wrap=True, highlight=False,
    )  # fmt: skip
    out.print(summary(found.own.scores, None).replace(THIN, " "), highlight=False)
    out.print(f"Report: {page}", soft_wrap=True)
    if made_by is not None:
        out.print(f"Next: calgp classify {path} photo.jpg --network {made_by.network}", soft_wrap=True)


def _summary(result: "FitResult", model: Path, predictions: Path | None) -> list[str]:
    """What was done, how good it is, and what to do next: a sentence each."""
    scores, rows, width = result.scores, result.rows, result.classifier.n_features_in_
    done = (
        f"Fitted a Gaussian process on {rows:,} embeddings of {width:,} numbers, {len(result.classifier.classes_)} "
        f"classes, in {result.seconds:.0f} seconds, into {model}."
    )
    wrong = round(scores.err * scores.n)
    where = "test rows" if result.tested_apart else "rows left out"
    verb = "is" if wrong == 1 else "are"
    good = (
        f"On {scores.n:,} {where} {wrong:,} {verb} wrong (ERR {scores.err:.4f}), MNLL {scores.mnll:.4f}, "
        f"ECE {scores.ece:.4f}."
    )
    if predictions is not None:
        return [done, good, f"Next: calgp judge {predictions} --html judged.html"]
    if result.made_by is not None:
        return [done, good, f"Next: calgp classify {model} photo.jpg --network {result.made_by.network}"]
    return [done, good, f'Next, in Python: calgp.GPClassifier.load("{model}").predict_proba(X)']


def classify(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The folder or file that `calgp fit` wrote.")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files, or folders of them.")],
    network: Annotated[str, typer.Option(help="The network that made the embeddings, as for `calgp embed`.")],
    weights: Annotated[
        str | None, typer.Option(help="Its file of weights.", show_default="as for `calgp embed`")
    ] = None,
    features: FeaturesOption = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write everything to this CSV file, too.", show_default="none")
    ] = None,
    escape_csv: EscapeOption = True,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Classify images by a pretrained network and the classifier that `calgp fit` made of its features.

    A network with other weights or other preprocessing than those of the embeddings is refused. The outlier score is
    higher for images that are less like the training images.

    Example: calgp classify model.safetensors photo.jpg --network timm:resnet18
    """
    from calgp.cli import tables
    from calgp.cli.classify_images import classified

    for path in images:
        if not path.exists():
            raise path_error("image", path)
    fabric = open_fabric(device, "32-true", threads)
    rows = tables.prediction_rows(classified(model, images, network, weights, features, device=fabric.device))
    if csv is not None:
        tables.write_csv(csv, [row.flat() for row in rows], escape=escape_csv)
    if as_json:
        return print(json.dumps([row.plain() for row in rows]))
    out.print(tables.prediction_table(rows))
