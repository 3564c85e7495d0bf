"""Headless Chromium, told what to do through a pipe: what a page logs, asks for and looks like."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
)

_START = """
import os, sys
reads, writes = (os.dup(os.dup(int(word))) for word in sys.argv[1:3])
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def browser() -> str | None:
    """Path of a browser, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Seen:
    """What a page did while it was open."""

    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Tab:
    """One tab. Commands are of the DevTools protocol; events are kept as they come."""

    def __init__(self, reads: BinaryIO, writes: BinaryIO) -> None:
        self._reads, self._writes = reads, writes
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """A command's result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._writes.write(json.dumps(message).encode() + b"\0")
        self._writes.flush()
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            more = os.read(self._reads.fileno(), 2**16)
            assert more, "the browser ended"
            self._buffer += more
        one, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(one)
        return message

    def look(self, page: Path, *, width: int, dark: bool, script: bool = True) -> Seen:
        """Open a page, and tell what it did until it had loaded."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Emulation.setScriptExecutionDisabled", value=not script)
        self.events.clear()
        self.send("Page.navigate", url=page.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())
        if script:
            self.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 30)))")
        return self._seen(page)

    def evaluate(self, code: str) -> Any:
        """The value of an expression on the page."""
        answer = self.send(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, path: Path) -> None:
        """A screenshot of the whole page."""
        data = self.send("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def key(self, key: str) -> None:
        """Press a key."""
        text = {"text": key} if len(key) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def _seen(self, page: Path) -> Seen:
        seen = Seen()
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Network.requestWillBeSent":
                url = params["request"]["url"]
                seen.requests += [url] if url != page.as_uri() else []
            elif method == "Runtime.exceptionThrown":
                seen.errors.append(str(params["exceptionDetails"]))
            elif method == "Log.entryAdded":
                seen.errors.append(params["entry"]["text"])
            elif method == "Runtime.consoleAPICalled":
                seen.errors.append(str(params["args"]))
        return seen


@contextmanager
def opened() -> Iterator[Tab]:
    """A browser with one tab."""
    path = browser()
    assert path is not None
    read_here, write_there = os.pipe()
    read_there, write_here = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", _START, str(read_there), str(write_there)),
                *(path, *OPTIONS, f"--user-data-dir={folder}"),
            ],
            pass_fds=(read_there, write_there),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_there)
        os.close(write_there)
        with os.fdopen(read_here, "rb") as reads, os.fdopen(write_here, "wb") as writes:
            try:
                yield Tab(reads, writes)
            finally:
                process.terminate()
                process.wait(10)
