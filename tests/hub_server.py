"""As much of the Hugging Face Hub as huggingface_hub needs to push and pull: a server on this machine, over a folder.

root/OWNER/NAME/commits/ID/… holds the files of each commit, refs/BRANCH the commit of a branch, root/objects what came
by Git LFS. "me" may write with the token `TOKEN`; nobody else may.
"""

import base64
import hashlib
import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_secret0123"  # noqa: S105 (of this server alone)
FIRST = "0" * 40  # the commit of a new repository


class HubServer(ThreadingHTTPServer):
    """`lfs`: files of at least so many bytes go by LFS. `cut`: the next download ends after so many bytes.

    `stall`: downloads wait in their middle until it is set. `seen`: method and path of each request.
    """

    daemon_threads = True

    def __init__(self, root: Path, lfs: int = 10**9) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root, self.lfs, self.cut = root, lfs, None
        self.stall: threading.Event | None = None
        self.reached = threading.Event()
        self.seen: list[tuple[str, str]] = []
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def files(self, repo: str, revision: str = "main") -> Path:
        place = self.root / repo
        named = place / "refs" / revision
        return place / "commits" / (named.read_text() if named.is_file() else revision)

    def commit(self, repo: str, branch: str, added: dict[str, bytes]) -> str:
        before = self.files(repo, branch)
        name = hashlib.sha1(repr((branch, before.name, sorted(added.items()))).encode()).hexdigest()  # noqa: S324
        after = shutil.copytree(before, before.parent / name)
        for path, data in added.items():
            (after / path).write_bytes(data)
        (self.root / repo / "refs" / branch).write_text(name)
        return name


class Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def answer(self, status: int, data: object = None, **headers: str) -> None:
        content = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def missing(self, what: str) -> None:
        self.answer(404, {"error": f"{what} not found"}, X_Error_Code=what)

    @property
    def known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def handle_request(self) -> None:
        self.path = unquote(urlsplit(self.path).path)
        self.server.seen.append((self.command, self.path))
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        for method, pattern, action in ROUTES:
            if method == self.command.replace("HEAD", "GET") and (found := re.fullmatch(pattern, self.path)):
                return action(self, **found.groupdict())
        self.answer(404, {"error": f"{self.command} {self.path}"})

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def may_read(self, repo: str, revision: str) -> bool:
        place = self.server.root / repo
        if not place.is_dir() or ((place / "private").exists() and not self.known):
            self.answer(404 if self.known else 401, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        elif not self.server.files(repo, revision).is_dir():
            self.missing("RevisionNotFound")
        else:
            return True
        return False

    def may_write(self, repo: str) -> bool:
        if not self.known:
            self.answer(401, {"error": "Invalid username or password."})
        elif not repo.startswith("me/"):
            self.answer(403, {"error": "You don't have the rights"}, X_Error_Message="You don't have the rights")
        return self.known and repo.startswith("me/")

    def create(self) -> None:
        asked = json.loads(self.body)
        repo = f"{asked['organization']}/{asked['name']}"
        if not self.may_write(repo):
            return
        place, url = self.server.root / repo, {"url": f"{self.server.address}/{repo}"}
        if place.exists():
            return self.answer(409, url | {"error": "You already created this model repo"})
        (place / "commits" / FIRST).mkdir(parents=True)
        (place / "commits" / FIRST / ".gitattributes").write_text("*.safetensors filter=lfs\n")
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text(FIRST)
        if asked.get("private") or asked.get("visibility") == "private":
            (place / "private").touch()
        self.answer(200, url)

    def info(self, repo: str, revision: str | None = None) -> None:
        if not self.may_read(repo, revision or "main"):
            return
        files = self.server.files(repo, revision or "main")
        names = [{"rfilename": path.name} for path in sorted(files.iterdir())]
        private = (self.server.root / repo / "private").exists()
        self.answer(200, {"id": repo, "sha": files.name, "private": private, "siblings": names, "tags": []})

    def branch(self, repo: str, revision: str) -> None:
        named = self.server.root / repo / "refs" / revision
        if not self.may_write(repo):
            return
        if named.exists():
            return self.answer(409, {"error": "Reference already exists"})
        named.write_text(self.server.files(repo).name)
        self.answer(200, {})

    def validate(self) -> None:
        text = json.loads(self.body)["content"]
        header = yaml.safe_load(re.fullmatch(r"---\n(.*?)\n---\n.*", text, re.S)[1])
        errors = [{"message": key} for key in ("library_name", "pipeline_tag", "tags") if not header.get(key)]
        self.answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def preupload(self, repo: str, revision: str) -> None:
        if not self.may_write(repo):
            return
        modes = []
        for each in json.loads(self.body)["files"]:
            mode, file = "lfs" if each["size"] >= self.server.lfs else "regular", each["path"]
            there = self.server.files(repo, revision) / file
            oid = content_id(there.read_bytes(), mode) if there.is_file() else None  # what is there is not sent again
            modes.append({"path": file, "shouldIgnore": False, "uploadMode": mode, "oid": oid})
        self.answer(200, {"files": modes})

    def lfs_batch(self, repo: str) -> None:
        if not self.may_write(repo):
            return
        objects = [
            {"oid": each["oid"], "size": each["size"],
             "actions": {"upload": {"href": f"{self.server.address}/objects/{each['oid']}"}}}
            for each in json.loads(self.body)["objects"]
        ]  # fmt: skip
        self.answer(200, {"transfer": "basic", "objects": objects}, Content_Type="application/vnd.git-lfs+json")

    def store(self, oid: str) -> None:
        right = hashlib.sha256(self.body).hexdigest() == oid
        if right:
            (self.server.root / "objects").mkdir(exist_ok=True)
            (self.server.root / "objects" / oid).write_bytes(self.body)
        self.answer(200 if right else 400, {})

    def commit(self, repo: str, revision: str) -> None:
        if not self.may_write(repo):
            return
        added = {}
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                added[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                added[value["path"]] = (self.server.root / "objects" / value["oid"]).read_bytes()
        name = self.server.commit(repo, revision, added)
        url = f"{self.server.address}/{repo}/commit/{name}"
        self.answer(200, {"commitUrl": url, "commitOid": name, "success": True})

    def resolve(self, repo: str, revision: str, name: str) -> None:
        if not self.may_read(repo, revision):
            return
        file = self.server.files(repo, revision) / name
        if not file.is_file():
            return self.missing("EntryNotFound")
        data = file.read_bytes()
        tag, commit = hashlib.sha256(data).hexdigest(), self.server.files(repo, revision).name
        if self.command == "HEAD" and len(data) >= self.server.lfs:  # large files lie elsewhere
            links = {"X_Linked_ETag": f'"{tag}"', "X_Linked_Size": str(len(data))}
            place = f"http://localhost:{self.server.server_address[1]}/elsewhere/{tag}"
            return self.answer(302, b"", X_Repo_Commit=commit, Location=place, **links)
        self.send_file(data, ETag=f'"{tag}"', X_Repo_Commit=commit)

    def elsewhere(self, oid: str) -> None:
        if "Authorization" in self.headers:  # it is another host's business
            return self.answer(400, {"error": "a token was sent to another host"})
        self.send_file((self.server.root / "objects" / oid).read_bytes())

    def send_file(self, data: bytes, **headers: str) -> None:
        whole, first = data, 0
        if found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            first = int(found[1])
            headers["Content_Range"] = f"bytes {first}-{len(whole) - 1}/{len(whole)}"
            data = whole[first:]
        if self.command == "HEAD" or (self.server.cut is None and self.server.stall is None):
            return self.answer(206 if found else 200, data, **headers)
        self.send_response(206 if found else 200)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data[: self.server.cut or len(data) // 2])
        self.server.reached.set()
        if self.server.stall is not None:
            self.server.stall.wait(60)
        self.server.cut, self.close_connection = None, True


def content_id(data: bytes, mode: str) -> str:
    """What Git LFS, or Git itself, calls a file with this content."""
    if mode == "lfs":
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # noqa: S324


REPO, REVISION = r"(?P<repo>[\w.-]+/[\w.-]+)", r"(?P<revision>[\w./-]+)"
ROUTES = [
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate),
    ("POST", f"/api/models/{REPO}/branch/{REVISION}", Handler.branch),
    ("POST", f"/api/models/{REPO}/preupload/{REVISION}", Handler.preupload),
    ("POST", f"/api/models/{REPO}/commit/{REVISION}", Handler.commit),
    ("GET", f"/api/models/{REPO}(/revision/{REVISION})?", Handler.info),
    ("POST", f"/{REPO}.git/info/lfs/objects/batch", Handler.lfs_batch),
    ("PUT", r"/objects/(?P<oid>\w+)", Handler.store),
    ("GET", rf"/{REPO}/resolve/(?P<revision>[\w.-]+)/(?P<name>[\w.-]+)", Handler.resolve),
    ("GET", r"/elsewhere/(?P<oid>\w+)", Handler.elsewhere),
]
