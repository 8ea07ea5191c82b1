"""A stand-in for the Hugging Face hub on this machine, and processes that know no other."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

HERE = Path(__file__).parents[1]


class Hub:
    """Serves ``root/<org>/<name>/...`` as repositories; every request is noted.

    Attributes:
        commit: What the branch "main" is at.
        mode: "ok"; "500", every answer an error; "one answer", from the second on; "hang", none;
            "broken", weights of half length; "gated".
        requests: (method, path), in order.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.commit = "1" * 40
        self.mode = "ok"
        self.requests: list[tuple[str, str]] = []
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), self.handler())
        self.server.daemon_threads = True
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def handler(self) -> type[BaseHTTPRequestHandler]:
        return _handler(self)

    def stop(self) -> None:
        self.mode = "gone"  # for connections that are kept open
        self.server.shutdown()
        self.server.server_close()

    def files_sent(self) -> list[str]:
        return [
            path.rpartition("/")[2]
            for method, path in self.requests
            if method == "GET" and "/resolve/" in path
        ]


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path))
            if hub.mode == "gone":
                self.close_connection = True
                return
            if hub.mode == "hang":
                time.sleep(30)
                return
            if hub.mode == "one answer":
                hub.mode = "500"
            elif hub.mode == "500":
                self.send(500, b"{}")
                return
            if hub.mode == "gated":
                self.send(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Ask."})
                return
            api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
            file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            found = api or file
            folder = hub.root / found[1] if found else None
            if folder is None or not folder.is_dir():
                self.miss("RepoNotFound")
            elif api and api[3] not in (None, "main", hub.commit):
                self.miss("RevisionNotFound")
            elif api and api[2] == "tree":
                self.json([_entry(folder, p) for p in sorted(folder.rglob("*"))])
            elif api:
                names = [{"rfilename": str(p.relative_to(folder))} for p in folder.rglob("*.*")]
                self.json({"id": api[1], "sha": hub.commit, "siblings": names, "private": False})
            elif file:
                self.file(folder / file[3])

        do_HEAD = do_GET

        def file(self, file: Path) -> None:
            if not file.is_file():
                self.miss("EntryNotFound")
                return
            data = file.read_bytes()
            head = {"X-Repo-Commit": hub.commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
            if hub.mode == "broken" and file.suffix == ".safetensors" and self.command == "GET":
                self.send(200, data[: len(data) // 2], head, length=len(data))
                self.close_connection = True
                return
            self.send(200, data, head)

        def json(self, value: Any) -> None:
            self.send(200, json.dumps(value).encode())

        def miss(self, code: str) -> None:
            self.send(404, b"{}", {"X-Error-Code": code})

        def send(
            self,
            status: int,
            body: bytes,
            head: dict[str, str] | None = None,
            length: int | None = None,
        ) -> None:
            self.send_response(status)
            for key, value in (head or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler


def _entry(folder: Path, path: Path) -> dict[str, Any]:
    name = path.relative_to(folder).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
    oid = hashlib.sha1(path.read_bytes()).hexdigest()
    return {"type": "file", "path": name, "oid": oid, "size": path.stat().st_size}


class Process:
    """A Python process with its own cache, to which calls of ``hub_calls`` are sent.

    huggingface_hub reads its environment when it is imported, so this one can't be changed to it.
    """

    program = ("-m", "hf.hub_calls")
    path = (str(HERE), str(HERE.parent / "src"))

    def __init__(self, hub: Hub, home: Path, **environment: str) -> None:
        own = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DOWNLOAD_TIMEOUT": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(self.path),
        }
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        self.process = subprocess.Popen(
            [sys.executable, *self.program],
            env=kept | own | environment,
            cwd=HERE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, name: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, arguments]) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        """{"value": ...} or {"error": text}, and "seconds"."""
        self.send(name, **arguments)
        return self.receive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
