"""The Hugging Face hub, against a server of our own that speaks as much of its API as is needed."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
import torch
from helpers import VIT, VIT_ARGS, pair, small_recipe

import maskaq
from maskaq.artifact.saved import push
from maskaq.errors import PretrainedError
from maskaq.images.stored import noise

hub = pytest.importorskip("huggingface_hub")
COMMIT = "0" * 40


def saved(tmp_path):
    student = pair(small_recipe())[1]
    return maskaq.save_pretrained(student, tmp_path / "saved", architecture={"name": VIT, "args": VIT_ARGS})


class Hub(BaseHTTPRequestHandler):
    """Repositories in memory: create, commit, look up, download."""

    repositories: ClassVar[dict] = {}

    def log_message(self, *args):
        pass

    def _answer(self, value=None, status=200, body=None, **headers):
        data = body if body is not None else json.dumps(value or {}).encode()
        self.send_response(status)
        for key, text in {"Content-Length": len(data), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(key.replace("_", "-"), str(text))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_POST(self):
        data = self._body()
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:3] == ["api", "repos", "create"]:
            asked = json.loads(data)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            self.repositories.setdefault(name, {})
            return self._answer({"url": f"{hub.constants.ENDPOINT}/{name}", "id": name})
        if parts[:2] == ["api", "validate-yaml"]:
            return self._answer({"errors": [], "warnings": []})
        name = "/".join(parts[2:4])
        if parts[4] == "preupload":
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(data)["files"]
            ]
            return self._answer({"files": files})
        for line in map(json.loads, data.splitlines()):
            if line["key"] == "file":
                self.repositories[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return self._answer(
            {"commitUrl": f"{hub.constants.ENDPOINT}/{name}/commit/{COMMIT}", "commitOid": COMMIT, "success": True}
        )

    def do_GET(self):
        parts = self.path.split("?")[0].strip("/").split("/")
        api = parts[0] == "api"
        name = "/".join(parts[2:4] if api else parts[:2])
        files = self.repositories.get(name)
        if files is None:
            return self._answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        if api and "tree" in parts:
            listed = [
                {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for path, data in files.items()
            ]
            return self._answer(body=json.dumps(listed).encode())
        if api:
            siblings = [{"rfilename": path} for path in files]
            return self._answer({"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []})
        data = files["/".join(parts[4:])]
        return self._answer(body=data, ETag=f'"{hashlib.sha1(data).hexdigest()}"')

    do_HEAD = do_GET


@pytest.fixture
def server(monkeypatch, tmp_path):
    Hub.repositories = {}
    running = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{running.server_port}"
    monkeypatch.setattr(hub.constants, "ENDPOINT", address)
    monkeypatch.setattr(
        hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield Hub
    running.shutdown()


def test_a_model_goes_to_the_hub_with_its_card_and_comes_back_the_same(server, tmp_path):
    folder = saved(tmp_path)
    address = push(folder, "user/small")
    assert set(server.repositories["user/small"]) == {"config.json", "model.safetensors", "README.md"}
    assert COMMIT in address
    loaded = maskaq.from_pretrained("user/small")
    here = maskaq.from_pretrained(folder)
    images = noise(here, 2, seed=0)
    assert torch.equal(loaded(images), here(images))


def test_what_is_not_there_is_one_clear_error(server, tmp_path):
    with pytest.raises(PretrainedError, match="user/none"):
        maskaq.from_pretrained("user/none")
    with pytest.raises(PretrainedError, match="USER/REPO"):
        push(saved(tmp_path), "no-slash")
