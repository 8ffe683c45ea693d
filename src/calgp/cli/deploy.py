"""Commands that hand a trained run to others: report, export, track, serve."""

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from calgp.cli import parameters, rooms
from calgp.cli.shared import open_folder, say, writable
from calgp.errors import CalgpError
from calgp.serve.limits import Limits


def report(
    run: Annotated[list[str], Argument(metavar="RUN...", help="Run folders, or `shipped`.")],
    file: Annotated[
        Path | None, Option("--out", help="The HTML file.", show_default="report.html in the first run")
    ] = None,
    data: parameters.Data = None,
) -> None:
    """One HTML page about one or more runs: scores, reliability, uncertainty inside and outside, images, training.

    Example: calgp report runs/mnist --out mnist.html
    """
    folders = [open_folder(name) for name in run]
    target = file if file is not None else writable(folders[0]).path / "report.html"
    path = rooms.report.write_report(folders, target, directory=data)
    say(f"Report: {path}")


def export(
    run: parameters.Run,
    *,
    to: Annotated[str, Option("--to", help="onnx or torch-export.")] = "onnx",
    file: Annotated[
        Path | None, Option("--out", help="The file.", show_default="model.onnx or model.pt2 in the run")
    ] = None,
    sampling: parameters.Sampling,
    uncalibrated: parameters.Uncalibrated = False,
    as_json: parameters.AsJson = False,
) -> None:
    """Write a run as one file that needs no calgp, with its uncertainty: probabilities, entropy, mutual information.

    A run with an integrated last layer becomes one deterministic pass. Of any other, the file holds the draws of
    --passes samples, those of `calgp predict`; all images of a batch share them. The file is run
    after writing, by ONNX Runtime with default optimisations or by torch, and kept only if it agrees with calgp to
    1e-5. Inputs and outputs of the file: docs/guides/deployment.md.

    Example: calgp export runs/mnist --to onnx --out mnist.onnx
    """
    folder = open_folder(run)
    target = writable(folder) if file is None else folder
    classifier = rooms.runs.Classifier.load(target, calibrated=not uncalibrated)
    done = classifier.export(file, to=to, **vars(sampling))  # type: ignore[arg-type]
    if as_json:
        return print(json.dumps(rooms.tables.export_row(done)))
    say(rooms.tables.export_lines(done))


def track(
    run: parameters.Run,
    to: Annotated[str, Option("--to", help="mlflow or tensorboard.")],
    where: Annotated[
        str | None,
        Option("--where", help="A directory, or an address that MLflow takes.", show_default="mlruns or events"),
    ] = None,
    model: Annotated[bool, Option("--model", help="Copy the weights too (MLflow).")] = False,
) -> None:
    """Copy a run into an experiment tracker: its options as parameters, its log and scores as metrics.

    Example: calgp track runs/mnist --to mlflow && calgp track runs/mnist --to tensorboard --where events
    """
    default = "mlruns" if to == "mlflow" else "events"
    say(rooms.trackers.track(open_folder(run), to, where or default, model=model))


def serve(
    run: Annotated[
        str | None, Argument(metavar="RUN", help="A run folder, or `shipped`.", show_default="with --demo")
    ] = None,
    *,
    demo: Annotated[bool, Option("--demo", help="Serve the run that comes with the package.")] = False,
    host: Annotated[str, Option(help="The address to listen on; only this machine unless given.")] = "127.0.0.1",
    port: Annotated[int, Option(min=1, max=65535, help="The port to listen on.")] = 8000,
    token_file: Annotated[
        Path | None,
        Option(help="A file with the token that clients must send.", show_default="$CALGP_TOKEN, else no token"),
    ] = None,
    allow_host: Annotated[
        list[str] | None, Option(help="A host name that clients may use, such as the proxy's.", show_default="none")
    ] = None,
    limit: Annotated[
        list[str] | None,
        Option(metavar="NAME=VALUE", help="A limit; docs/serve.md says what each means.", show_default=str(Limits())),
    ] = None,
    compute: parameters.Compute,
) -> None:
    """Serve a run over HTTP: a page at / and an API (/openapi.json). Ctrl-C or SIGTERM finishes what was accepted.

    Example: calgp serve --demo --port 8000
    """
    try:
        from calgp.runs import Classifier
        from calgp.serve import read_token
        from calgp.serve import serve as serve_run
    except ModuleNotFoundError as error:
        raise CalgpError(f"`calgp serve` needs {error.name}: pip install 'calgp[serve]' brings it.") from None

    if demo == (run is not None):
        raise CalgpError("Invalid RUN: must be one run folder, such as runs/mnist, or --demo for that in the package.")
    limits, token = Limits.parse(limit or []), read_token(token_file)
    classifier = Classifier.load(open_folder(run or "shipped"), fabric=compute.open())
    say(f"Serving {classifier.card.label} on http://{host}:{port} (Ctrl-C stops it).")
    hosts = allow_host or ()
    serve_run(classifier, host=host, port=port, limits=limits, token=token, hosts=hosts, threads=compute.threads)
