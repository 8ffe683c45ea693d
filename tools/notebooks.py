"""Run the notebooks of examples/ and store what they really print: `python tools/notebooks.py [NAME …]`.

Each runs in an empty folder, from top to bottom, with one thread; tests/test_docs.py does the same, in one process.
"""

import sys
import tempfile
import time
from pathlib import Path

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"


def execute(path: Path, folder: Path, kernel: AsyncKernelManager | None = None) -> nbformat.NotebookNode:
    """The notebook with the outputs of a run in `folder`; a cell that fails raises.

    In a process of its own, or in that of `kernel`, where nothing that others have defined is left.
    """
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(folder)}}
    if kernel is not None:
        notebook.cells.insert(0, nbformat.v4.new_code_cell(f"%reset -f\n%cd -q {folder}"))
    client = NotebookClient(notebook, km=kernel, timeout=1200, kernel_name="python3", resources=place)
    client.execute()
    if kernel is not None:
        client.kc.stop_channels()
        del notebook.cells[0]
    for cell in notebook.cells:  # times of execution would differ each time; tqdm asks for widgets that nobody needs
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if "TqdmWarning" not in each.get("text", "")]
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def main(names: list[str]) -> None:
    for path in sorted(EXAMPLES.glob("*.ipynb")):
        if not names or path.stem in names:
            start = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                notebook = execute(path, Path(folder))
            nbformat.write(notebook, path)
            print(f"{path.name}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
