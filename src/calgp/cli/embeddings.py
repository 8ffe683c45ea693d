"""Commands for pretrained networks: embed (images to vectors), fit (vectors to a classifier), classify (new images)."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from calgp.cli import parameters, rooms
from calgp.cli.predict import show_predictions
from calgp.cli.shared import check_images, check_seed, out, say

FeaturesOption = Annotated[
    str | None, Option(help="The module whose output is used as features.", show_default="what enters the last layer")
]


def embed(
    *,
    network: Annotated[
        str, Option(help="timm:NAME, torchvision:NAME, transformers:FOLDER, or file.py:function for your own.")
    ],
    source: Annotated[str, Option(help="folder:PATH, shards:PATH, or an image set such as cifar10.")],
    folder: Annotated[Path, Option("--out", help="The folder of embeddings.")],
    weights: Annotated[
        str | None,
        Option(
            help="A .safetensors file or a PyTorch state dict; `random` for none.",
            show_default="downloaded by the library; those that file.py:function gives",
        ),
    ] = None,
    split: Annotated[Literal["train", "val", "test", "all"], Option(help="Which images.")] = "all",
    features: FeaturesOption = None,
    batch_size: Annotated[int, Option(help="Images at a time.")] = 50,
    rows_per_shard: Annotated[int, Option(help="Images in each file; an interruption loses at most one file.")] = 1000,
    skip_unreadable: Annotated[bool, Option("--skip-unreadable", help="Leave out damaged images.")] = False,
    data: parameters.Data = None,
    compute: parameters.Compute,
    workers: Annotated[
        int | None, Option(help="Processes that decode images.", show_default="$CALGP_WORKERS, else 2")
    ] = None,
    places: parameters.Workers,
) -> None:
    """Run a pretrained network once over images, and keep its features as embeddings.

    Size, mean, deviation and interpolation are those of the network itself. Ctrl-C loses at most one file of the
    embeddings: the same command goes on where it was, and ends with the same bytes. --jobs 4 makes four files at a
    time; --engine ray makes them on a Ray cluster, whose machines must see the same folders, and where a process that
    dies is replaced. Each of these has one thread: the bytes are those of --threads 1.

    Example: calgp embed --network timm:resnet18 --source folder:photos --out embeddings
    """
    options, engine = rooms.embed.EmbedOptions(batch_size, rows_per_shard, workers, compute.device), places.find()
    extractor = rooms.pretrained.find_network(network, weights, features=features).to(compute.open().device)
    images = rooms.original.open_original(
        source, split, colour=extractor.preprocessing.colour, directory=data, skip_unreadable=skip_unreadable
    )
    _embed(extractor, images, folder, source, split, options, engine)
    say(f"Next: calgp fit {folder} --out model.safetensors")


def _embed(
    extractor: "rooms.pretrained.FeatureExtractor", images: "rooms.original.OriginalImages", folder: Path,
    source: str, split: str, options: "rooms.embed.EmbedOptions", engine: "rooms.engines.Engine",
) -> None:  # fmt: skip
    """Run the network, with a bar, over what the folder does not have yet."""
    with rooms.bars.bar(f"{extractor.name} over {len(images):,} images of {source}") as advance:
        done = rooms.embed.embed(
            extractor, images, folder, source=source, split=split, options=options, engine=engine, watch=advance
        )
    size = done.preprocessing.size
    say(
        f"{folder} has {done.rows:,} embeddings of {done.width:,} numbers, {len(done.classes)} classes, from images of "
        f"{size} pixels."
    )


def fit(
    model: Annotated[
        Path, Option("--out", help="The run folder, with a report; or a .safetensors file, the classifier alone.")
    ],
    embeddings: Annotated[
        Path | None,
        Argument(
            metavar="EMBEDDINGS",
            help="A folder of `calgp embed`, or .npz, .npy, .safetensors, .parquet with X and y; with --network, the "
            "folder to make.",
            show_default="with --network, beside --out, named by network and images",
        ),
    ] = None,
    test: Annotated[Path | None, Option(help="Embeddings to test on.", show_default="a fifth of the rows")] = None,
    holdout: Annotated[
        float, Option(help="Share of the rows kept for `calgp calibrate` and `calgp decide`; of a run folder.")
    ] = 0.0,
    predictions: Annotated[
        Path | None, Option(help="Write the tested probabilities here, for `calgp judge`.", show_default="none")
    ] = None,
    network: Annotated[
        str | None, Option(help="Embed images by this network first, as `calgp embed` does.", show_default="none")
    ] = None,
    source: Annotated[
        str | None, Option(help="The images for --network, such as folder:photos.", show_default="none")
    ] = None,
    weights: Annotated[str | None, Option(help="Weights for --network.", show_default="as of `calgp embed`")] = None,
    seed: Annotated[int, Option(help="Seed that chooses the test rows.", callback=check_seed)] = 0,
    data: parameters.Data = None,
    threads: parameters.Threads = None,
) -> None:
    """Fit a Gaussian process classifier on embeddings; it needs no other option.

    With --network, the embeddings are kept: fitting again on the same images does not run the network again.

    Into a run folder: a fifth of the rows (or --test) tests it, and report.html shows how good it is; `calgp evaluate`,
    `calibrate`, `decide`, `report`, `compare` and `export` take the folder. Into a .safetensors file: the same, then
    all rows are used.

    Example: calgp fit --network timm:resnet18 --source folder:photos --out runs/photos
    """
    folder = model.suffix != ".safetensors"
    rooms.embedding_work.check_fit(embeddings, network, source, holdout, predictions, folder=folder)
    parameters.Compute("cpu", threads).open()
    if folder:
        rooms.vector_runs.check_new(model)  # before the network runs
    if network is not None and source is not None:
        embeddings = _embedded(network, source, weights, embeddings, model.parent, data)
    assert embeddings is not None  # noqa: S101  (check_fit has seen to it)
    if folder:
        return _fit_folder(model, embeddings, test, holdout=holdout, seed=seed)
    result = rooms.embedding_work.fit_and_test(embeddings, test, seed=seed)
    result.classifier.save(model, made_by=result.made_by)
    if predictions is not None:
        rooms.embedding_work.write_predictions(result, predictions)
    say("\n".join(_summary(result, model, predictions)))


def _embedded(
    network: str, source: str, weights: str | None, folder: Path | None, beside: Path, data: Path | None
) -> Path:
    """The folder of a source's embeddings, made now as far as it is not there."""
    extractor = rooms.pretrained.find_network(network, weights)
    images = rooms.original.open_original(source, colour=extractor.preprocessing.colour, directory=data)
    place: Path = folder or beside / rooms.embed.cache_name(extractor, images, source)
    _embed(extractor, images, place, source, "all", rooms.embed.EmbedOptions(), rooms.engines.SerialEngine())
    return place


def _fit_folder(path: Path, embeddings: Path, test: Path | None, *, holdout: float, seed: int) -> None:
    """Fit, evaluate and report, and say what was done."""
    made_by = rooms.cache.read_manifest(embeddings).made_by if embeddings.is_dir() else None
    run = rooms.vector_runs.fit_folder(path, embeddings, test, holdout=holdout, seed=seed, made_by=made_by)
    found = run.evaluate()
    page = run.report()
    out.print(rooms.tables.evaluation_table(found))
    rows, width = run.card.train_images, run.card.task.height
    say(f"Fitted a Gaussian process on {rows:,} embeddings of {width:,} numbers, {len(run.classes)} classes: {path}")
    out.print(rooms.words.summary(found.own.scores, None).replace(rooms.words.THIN, " "), highlight=False)
    say(f"Report: {page}")
    if made_by is not None:
        say(f"Next: calgp classify {path} photo.jpg --network {made_by.network}")


def _summary(result: "rooms.embedding_work.FitResult", model: Path, predictions: Path | None) -> list[str]:
    """What was done, how good it is, and what to do next: a sentence each."""
    scores, classifier = result.scores, result.classifier
    wrong = round(scores.err * scores.n)
    where = "test rows" if result.tested_apart else "rows left out"
    lines = [
        f"Fitted a Gaussian process on {result.rows:,} embeddings of {classifier.n_features_in_:,} numbers, "
        f"{len(classifier.classes_)} classes, in {result.seconds:.0f} seconds, into {model}.",
        f"On {scores.n:,} {where} {wrong:,} {'is' if wrong == 1 else 'are'} wrong (ERR {scores.err:.4f}), MNLL "
        f"{scores.mnll:.4f}, ECE {scores.ece:.4f}.",
    ]
    if predictions is not None:
        return [*lines, f"Next: calgp judge {predictions} --html judged.html"]
    if result.made_by is not None:
        return [*lines, f"Next: calgp classify {model} photo.jpg --network {result.made_by.network}"]
    return [*lines, f'Next, in Python: calgp.GPClassifier.load("{model}").predict_proba(X)']


def classify(
    model: Annotated[Path, Argument(metavar="MODEL", help="The folder or file that `calgp fit` wrote.")],
    images: Annotated[list[Path], Argument(metavar="IMAGE...", help="Image files, or folders of them.")],
    *,
    network: Annotated[str, Option(help="The network that made the embeddings, as for `calgp embed`.")],
    weights: Annotated[str | None, Option(help="Its file of weights.", show_default="as for `calgp embed`")] = None,
    features: FeaturesOption = None,
    table: parameters.Csv,
    compute: parameters.Compute,
    as_json: parameters.AsJson = False,
) -> None:
    """Classify images by a pretrained network and the classifier that `calgp fit` made of its features.

    A network with other weights or other preprocessing than those of the embeddings is refused. The outlier score is
    higher for images that are less like the training images.

    Example: calgp classify model.safetensors photo.jpg --network timm:resnet18
    """
    check_images(images)
    found = rooms.embedding_work.classified(model, images, network, weights, features, device=compute.open().device)
    show_predictions(found, table, as_json=as_json)
