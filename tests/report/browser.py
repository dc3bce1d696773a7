"""A headless Chromium that tests control through a pipe, by its DevTools protocol, without a library or a network."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TIMEOUT_S = 60


class Browser:
    """One page of one browser. What it logs and asks the network for is kept."""

    def __init__(self, folder: Path) -> None:
        (own_read, self._write), (self._read, own_write) = os.pipe(), os.pipe()
        # The browser reads from 3 and writes to 4: high numbers are in the way of neither.
        read, write = (fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 10) for each in (own_read, own_write))
        os.close(own_read)
        os.close(own_write)
        own = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        own += ["--disable-dev-shm-usage", "--disable-background-networking", "--disable-extensions"]
        own += [f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank"]
        command = ["bash", "-c", f'exec "$@" 3<&{read} 4>&{write} {read}<&- {write}>&-', "bash", *own]
        self._log = (folder / "browser.log").open("w")
        self._process = subprocess.Popen(
            command, pass_fds=(read, write), stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            start_new_session=True,
        )  # fmt: skip
        os.close(read)
        os.close(write)
        self._buffer, self._number, self.session = b"", 0, None
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._seen: set[str] = set()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _receive(self):
        end_s = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end_s - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method, parameters) -> None:
        self._seen.add(method)
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled":
            self.problems.append(f"console.{parameters['type']}: {parameters['args']}")
        elif method == "Log.entryAdded":
            self.problems.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not parameters["request"]["url"].startswith("data:"):
            self.requests.append(parameters["request"]["url"])

    def open(self, page: Path, *, width: int, dark: bool = False, scripts: bool = True, media: str = "") -> None:
        """Open a page and wait until it is loaded; its problems and requests are those since then."""
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.resize(width, dark=dark, media=media)
        self.problems, self.requests, self._seen = [], [], set()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while "Page.loadEventFired" not in self._seen:
            self._receive()
        if not scripts:  # for the tests' own questions
            self.call("Emulation.setScriptExecutionDisabled", value=False)

    def resize(self, width: int, *, dark: bool = False, media: str = "") -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)

    def value(self, expression: str):
        """Return the value of a JavaScript expression in the page; a promise's when it is there."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def picture(self, path: Path) -> None:
        """Write a picture of the whole page."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        self.session = None
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close")
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)
        os.close(self._read)
        os.close(self._write)
        self._log.close()
