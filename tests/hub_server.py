"""A Hugging Face Hub in a thread: the few answers that huggingface_hub needs to read and write."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

TOKEN = "hf_" + "secret" * 5
LARGE = (".safetensors", ".bin")
"""Endings of the files that are stored apart (LFS)."""


@dataclass
class Repo:
    """A model: its commits, each with all files, the newest last."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes]) -> str:
        sha = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()  # noqa: S324
        self.commits[sha] = files
        return sha

    def sha(self, revision: str) -> str | None:
        if revision == "main":
            return next(reversed(self.commits), None)
        revision = self.tags.get(revision, revision)
        return revision if revision in self.commits else None


class HubServer:
    """The server; `repos` can be read and changed by a test.

    Attributes:
        requests: method and path of each request.
        writable: the users that the token may write to.
        tokens: the Authorization headers that were sent.
        away: whether the server ends every connection without an answer.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.tokens: set[str] = set()
        self.writable = {"me"}
        self.away = False
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def add(self, name: str, files: dict[str, bytes], private: bool = False) -> str:
        """Make a model with one commit, or add a commit; its hash."""
        repo = self.repos.setdefault(name, Repo(private))
        before = repo.commits[repo.sha("main")] if repo.commits else {}
        return repo.commit(before | files)

    def files(self, name: str) -> dict[str, bytes]:
        """The files of the last commit."""
        repo = self.repos[name]
        return repo.commits[repo.sha("main") or ""]

    @contextmanager
    def running(self) -> Iterator[HubServer]:
        thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.server.shutdown()
            thread.join()
            self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def answer(self, code: int, body: Any = b"", **headers: str) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        kind = {} if isinstance(body, bytes) else {"Content-Type": "application/json"}
        length = {} if "Content-Length" in headers else {"Content-Length": str(len(raw))}
        for name, value in {**kind, **length, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def refuse(self, code: int, error: str, kind: str = "") -> None:
        headers = {"X_Error_Message": error} | ({"X_Error_Code": kind} if kind else {})
        self.answer(code, {"error": error}, **headers)

    def handle_request(self) -> None:
        if self.hub.away:
            self.close_connection = True
            return
        split = urlsplit(self.path)
        path, query = unquote(split.path), parse_qs(split.query)
        self.hub.requests.append(f"{self.command} {path}")
        given = self.headers.get("Authorization")
        if given:
            self.hub.tokens.add(given)
        self.known = given == f"Bearer {TOKEN}"
        if given and not self.known and not path.startswith("/lfs/"):
            self.refuse(401, "Invalid credentials in Authorization header")
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        for pattern, method in ROUTES:
            if found := re.fullmatch(pattern, f"{self.command} {path}"):
                method(self, *found.groups(), body=body, query=query)
                return
        self.refuse(404, f"no such route: {path}")

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    # ------------------------------------------------------------------------------------ writing

    def whoami(self, **_: Any) -> None:
        if self.known:
            self.answer(200, {"type": "user", "name": "me", "orgs": [], "auth": {}})
        else:
            self.refuse(401, "Invalid username or password.")

    def create(self, *, body: bytes, **_: Any) -> None:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        if not self.known:
            self.refuse(401, "Invalid username or password.")
        elif asked["organization"] not in self.hub.writable:
            self.refuse(403, "You don't have the rights to create a model under this namespace")
        elif name in self.hub.repos:
            self.answer(409, {"error": "You already created this model repo", "url": name})
        else:
            hidden = asked.get("private") or asked.get("visibility") == "private"
            self.hub.repos[name] = Repo(bool(hidden))
            self.hub.repos[name].commit({".gitattributes": b"*.safetensors filter=lfs\n"})
            self.answer(200, {"url": f"{self.hub.url}/{name}", "name": name})

    def validate(self, *, body: bytes, **_: Any) -> None:
        text = json.loads(body)["content"]
        found = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
        tree = yaml.safe_load(found[1]) if found else {}
        errors = [] if isinstance(tree, dict) else [{"message": "the metadata is no mapping"}]
        if isinstance(tree, dict) and not isinstance(tree.get("base_model", ""), str):
            errors.append({"message": "base_model must be a string"})
        self.answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def preupload(self, name: str, _: str, *, body: bytes, **__: Any) -> None:
        files = json.loads(body)["files"]
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for file in files
        ]
        self.answer(200, {"files": modes})

    def batch(self, name: str, *, body: bytes, **_: Any) -> None:
        objects = []
        for one in json.loads(body)["objects"]:
            upload = {"href": f"{self.hub.url}/lfs/{one['oid']}"}
            there = one["oid"] in self.hub.objects
            objects.append(one | ({} if there else {"actions": {"upload": upload}}))
        self.answer(200, {"transfer": "basic", "objects": objects})

    def store(self, oid: str, *, body: bytes, **_: Any) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            self.refuse(400, "the content has another hash")
            return
        self.hub.objects[oid] = body
        self.answer(200)

    def commit(self, name: str, _: str, *, body: bytes, **__: Any) -> None:
        if not self.known or name.partition("/")[0] not in self.hub.writable:
            self.refuse(403, "no write access")
            return
        new: dict[str, bytes] = {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                new[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                new[value["path"]] = self.hub.objects[value["oid"]]
        sha = self.hub.add(name, new)
        url = f"{self.hub.url}/{name}/commit/{sha}"
        self.answer(200, {"success": True, "commitOid": sha, "commitUrl": url})

    # ------------------------------------------------------------------------------------ reading

    def found(self, name: str, revision: str) -> tuple[Repo, str] | None:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and not self.known):
            self.refuse(404 if self.known else 401, "Repository not found", "RepoNotFound")
            return None
        if (sha := repo.sha(revision)) is None:
            self.refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
            return None
        return repo, sha

    def info(self, name: str, revision: str | None = None, **_: Any) -> None:
        if found := self.found(name, revision or "main"):
            repo, sha = found
            files = [{"rfilename": path} for path in repo.commits[sha]]
            about = {"id": name, "modelId": name, "sha": sha, "private": repo.private}
            more = {"_id": "1", "tags": [], "downloads": 0, "likes": 0, "siblings": files}
            self.answer(200, about | more)

    def tree(self, name: str, revision: str, folder: str | None = None, **_: Any) -> None:
        if found := self.found(name, revision):
            repo, sha = found
            start = f"{folder}/" if folder else ""
            names = {
                path.removeprefix(start) for path in repo.commits[sha] if path.startswith(start)
            }
            files = [entry(start + path, repo.commits[sha]) for path in names if "/" not in path]
            folders = {path.partition("/")[0] for path in names if "/" in path}
            more = [{"type": "directory", "path": start + one, "oid": "0" * 40} for one in folders]
            self.answer(200, [*files, *more])

    def paths(self, name: str, revision: str, *, body: bytes, **_: Any) -> None:
        if found := self.found(name, revision):
            repo, sha = found
            wanted = (
                json.loads(body)["paths"] if body[:1] == b"{" else parse_qs(body.decode())["paths"]
            )
            wanted = [wanted] if isinstance(wanted, str) else wanted
            files = repo.commits[sha]
            self.answer(200, [entry(path, files) for path in wanted if path in files])

    def resolve(self, name: str, revision: str, path: str, **_: Any) -> None:
        if not (found := self.found(name, revision)):
            return
        repo, sha = found
        if path not in repo.commits[sha]:
            self.refuse(404, "Entry not found", "EntryNotFound")
            return
        raw = repo.commits[sha][path]
        about = {"ETag": f'"{hashlib.sha256(raw).hexdigest()}"', "X_Repo_Commit": sha}
        about |= {"Accept_Ranges": "bytes"}
        if part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, stop = int(part[1]), int(part[2] or len(raw) - 1) + 1
            where = {"Content_Range": f"bytes {start}-{min(stop, len(raw)) - 1}/{len(raw)}"}
            self.answer(206, raw[start:stop], **about, **where)
            return
        self.answer(200, raw, **about)


def entry(path: str, files: dict[str, bytes]) -> dict[str, Any]:
    """What the Hub says of a file."""
    raw = files[path]
    oid = hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest()  # noqa: S324
    found = {"type": "file", "path": path, "size": len(raw), "oid": oid}
    if path.endswith(LARGE):
        sha = hashlib.sha256(raw).hexdigest()
        found["lfs"] = {"oid": sha, "size": len(raw), "pointerSize": 134}
    return found


_ID = r"([\w.-]+/[\w.-]+?)"
ROUTES = [
    (r"GET /api/whoami-v2", _Handler.whoami),
    (r"POST /api/repos/create", _Handler.create),
    (r"POST /api/validate-yaml", _Handler.validate),
    (rf"POST /api/models/{_ID}/preupload/([^/]+)", _Handler.preupload),
    (rf"POST /{_ID}\.git/info/lfs/objects/batch", _Handler.batch),
    (r"PUT /lfs/([0-9a-f]{64})", _Handler.store),
    (rf"POST /api/models/{_ID}/commit/([^/]+)", _Handler.commit),
    (rf"GET /api/models/{_ID}/tree/([^/]+)(?:/(.+))?", _Handler.tree),
    (rf"POST /api/models/{_ID}/paths-info/([^/]+)", _Handler.paths),
    (rf"GET /api/models/{_ID}/revision/([^/]+)", _Handler.info),
    (r"GET /api/models/([\w.-]+/[\w.-]+)", _Handler.info),
    (rf"(?:GET|HEAD) /{_ID}/resolve/([^/]+)/(.+)", _Handler.resolve),
]
