"""Runs on the Hugging Face Hub: `push` and `pull`. Nothing else of calgp needs it.

A repository holds the file of `calgp pack` and a model card. What arrives is trusted no more than any other file: it is
unpacked only if every byte is what `pack` has written. Who you are is the business of huggingface_hub (HF_TOKEN, or
`hf auth login`); calgp neither prints nor keeps a token.
"""

import errno
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calgp.errors import CalgpError, printable, short_repr
from calgp.report.model_card import model_card
from calgp.runs import RunFolder
from calgp.runs.pack import Damaged, check_new, pack, unpack

FILE, CARD = "run.calgp", "README.md"  # what a repository holds
OTHERS = {CARD, ".gitattributes"}  # the Hub makes them by itself
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


@dataclass(frozen=True)
class Pushed:
    """Where a run is now: the address of its repository, the commit, and the bytes of the packed run."""

    address: str
    commit: str
    size: int


def push(folder: RunFolder, repo: str, *, private: bool = False, revision: str | None = None) -> Pushed:
    """Write a finished run into the repository OWNER/NAME of the Hub, which is made if need be, in one commit.

    Args:
        folder: a finished run.
        repo: OWNER/NAME; a repository that holds other files than a run is refused.
        private: others cannot see the repository; one that is there and public is refused.
        revision: a branch, which is made if need be; main if None.
    """
    hub = _client()
    _check_names(hub, repo, revision)
    if not folder.finished:
        raise CalgpError(f"{folder.path} has no model to publish; train it first, then push it.")
    card = model_card(folder, repo).encode()
    with tempfile.TemporaryDirectory(prefix="calgp-push-") as aside:
        packed = Path(aside) / FILE
        pack(folder, packed)
        with _wrap_hub_errors(hub, repo, revision, "write to"):
            api = hub.HfApi(library_name="calgp")
            api.create_repo(repo, private=private or None, exist_ok=True)
            _check_repository(api.model_info(repo), repo, private)
            if revision is not None:
                api.create_branch(repo, branch=revision, exist_ok=True)
            files = [hub.CommitOperationAdd(FILE, packed), hub.CommitOperationAdd(CARD, card)]
            message = f"{folder.card().label}, packed by calgp"
            done = api.create_commit(repo, files, commit_message=message, revision=revision)
        return Pushed(f"{hub.constants.ENDPOINT}/{repo}", done.oid, packed.stat().st_size)


def pull(repo: str, target: str | Path | None = None, *, revision: str | None = None) -> RunFolder:
    """Write the run of a repository of the Hub as a new folder, which appears whole and verified or not at all.

    The packed run stays in the cache of huggingface_hub, so pulling it again needs no second download.

    Args:
        repo: OWNER/NAME.
        target: the folder to make; runs/NAME if None.
        revision: a branch, a tag or a commit; main if None.
    """
    hub = _client()
    _check_names(hub, repo, revision)
    target = Path("runs", repo.partition("/")[2]) if target is None else Path(target)
    check_new(target)
    why = ""
    for again in (False, True):  # the copy in the cache may be at fault, not the one on the Hub
        try:
            return unpack(_download(hub, repo, revision, force_download=again), target)
        except Damaged as error:
            why = error.why
    raise CalgpError(
        f"The file {FILE} of {repo} is not what `calgp push` wrote ({why}): it was changed, or is damaged. Ask its "
        "owner, or pull an earlier commit with --revision. Nothing was written."
    )


def _client() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils  # not all its versions bring these by themselves
    except ImportError:
        raise CalgpError("The client of the Hugging Face Hub is not here: pip install 'calgp[hub]'.") from None
    return huggingface_hub


def _check_names(hub: Any, repo: str, revision: str | None) -> None:
    """Refuse what is no name, before anything is packed or asked for."""
    wrong = CalgpError(f"Invalid repository {short_repr(repo)}: must be OWNER/NAME, such as me/digits.")
    try:
        hub.utils.validate_repo_id(repo)
    except hub.errors.HFValidationError:
        raise wrong from None
    if repo.count("/") != 1:
        raise wrong
    if revision is not None and not re.fullmatch(r"(?![-/.])[\w./-]{1,200}", revision, re.ASCII):
        raise CalgpError(f"Invalid revision {short_repr(revision)}: must be a branch, a tag or a commit, such as main.")
    token = hub.get_token()
    if token is not None and not re.fullmatch(r"[!-~]+", token):  # no header could hold it; its error would show it
        raise CalgpError(f"The token for the Hub has characters that no token has; {LOGIN} again.")


def _check_repository(found: Any, repo: str, private: bool) -> None:
    """Refuse to publish what shall be private, and to mix a run with somebody's files."""
    if private and not found.private:
        raise CalgpError(f"{repo} is there already and is public; make it private on its page, or choose a new name.")
    names = {each.rfilename for each in found.siblings or ()}
    if FILE not in names and (others := sorted(names - OTHERS)):
        raise CalgpError(f"{repo} holds other files ({short_repr(others)}) and no run of calgp; choose a new name.")


def _download(hub: Any, repo: str, revision: str | None, **options: bool) -> Path:
    with _wrap_hub_errors(hub, repo, revision, "read"):
        return Path(hub.hf_hub_download(repo, FILE, revision=revision, library_name="calgp", **options))


@contextmanager
def _wrap_hub_errors(hub: Any, repo: str, revision: str | None, what: str) -> Iterator[None]:
    """Failures of the Hub and of the way there, as one clear sentence."""
    try:
        yield
    except CalgpError:
        raise
    except Exception as error:  # of the client, of its HTTP library (which has changed twice), of its storage engine
        cause = error.__cause__ if isinstance(error, hub.errors.LocalEntryNotFoundError) else None
        raise _user_error(hub, cause or error, repo, revision, what) from None


def _user_error(hub: Any, error: Any, repo: str, revision: str | None, what: str) -> CalgpError:
    errors, place = hub.errors, hub.constants.ENDPOINT
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if isinstance(error, errors.GatedRepoError):
        return CalgpError(f"{repo} is open to those only whom its owner admits; ask on {place}/{repo}, and {LOGIN}.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return CalgpError(f"There is no repository {repo} on {place}, or it is private; check the name, or {LOGIN}.")
    if isinstance(error, errors.RevisionNotFoundError):
        return CalgpError(f"{repo} has no revision {revision}; its branches, tags and commits are on {place}/{repo}.")
    if isinstance(error, errors.EntryNotFoundError):
        return CalgpError(f"{repo} holds no run of calgp: it has no file {FILE}. `calgp push` writes one.")
    if status in (401, 403):
        return CalgpError(f"No permission to {what} {repo} on {place}; {LOGIN}: a token that may do it.")
    if isinstance(error, OSError) and (error.filename is not None or error.errno == errno.ENOSPC):
        cache = hub.constants.HF_HUB_CACHE
        return CalgpError(f"Cannot write in {cache}: {error.strerror}. Make room, or choose another HF_HOME.")
    said = printable(" ".join(str(error).split()))[:300].rstrip(".")
    if status is not None:
        return CalgpError(f"{place} refuses to {what} {repo}: {said}. Try again later, or look at {place}/{repo}.")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return CalgpError(f"Cannot {what} {repo}: HF_HUB_OFFLINE is set, and the cache has no copy; unset it.")
    return CalgpError(
        f"Cannot {what} {repo}: {type(error).__name__}: {said}. Check the network and that {place} can be reached "
        "(HF_ENDPOINT, proxy), then try again; nothing was written here."
    )
