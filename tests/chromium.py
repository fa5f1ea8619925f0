"""Chromium by its own protocol, over a pipe: pages that load themselves again can be watched while they do."""

import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# Errors of the protocol where the page that was asked is no longer there.
REPLACED = (
    "Inspected target navigated or closed",
    "Execution context was destroyed.",
    "Cannot find default execution context",
)
CONSOLE_EVENTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


class Tab:
    """A tab of a browser that runs.

    Attributes:
        console: What the console of the tab has received, of every page that it has shown.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._rest, self._count, self._session = b"", 0, ""
        self.console: list[Any] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """The browser's answer to a command."""
        message = self._answer(method, parameters)
        assert "error" not in message, f"{method}: {message['error']}"
        return message["result"]

    def _answer(self, method: str, parameters: dict[str, Any]) -> Any:
        self._count += 1
        session = {"sessionId": self._session} if self._session else {}
        command = {"id": self._count, "method": method, "params": parameters, **session}
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == self._count:
                return message

    def look(self, width: int, dark: bool) -> Self:
        """Take a window of this width, and a system that is light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        return self

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript in the page; None where it fails, or where another page takes its place meanwhile."""
        message = self._answer("Runtime.evaluate", {"expression": expression, "returnByValue": True, "silent": True})
        if "error" in message and message["error"]["message"] in REPLACED:
            return None
        found = message["result"]
        return None if "exceptionDetails" in found else found["result"].get("value")

    def until(self, expression: str, seconds: float = 60) -> Any:
        """The first value of an expression that is true."""
        end = time.monotonic() + seconds
        while not (found := self.evaluate(expression)):
            assert time.monotonic() < end, f"not within {seconds} seconds: {expression}"
            time.sleep(0.05)
        return found

    def _message(self) -> Any:
        while b"\0" not in self._rest:
            received = os.read(self._answers, 1 << 20)
            assert received, "the browser has ended"
            self._rest += received
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        if message.get("method") in CONSOLE_EVENTS:
            self.console.append(message["params"])
        return message


@contextmanager
def chromium(folder: Path) -> Iterator[Tab]:
    """A tab of a new browser, whose profile lies in a folder. It ends with the block."""
    assert CHROMIUM is not None
    (theirs_in, commands), (answers, theirs_out) = os.pipe(), os.pipe()
    # The protocol wants these numbers, which pipes of this process may have: move those out of the way first.
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (theirs_in, theirs_out)]
    browser = subprocess.Popen(
        [CHROMIUM, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}"],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)},
        pass_fds=(3, 4),
        preexec_fn=lambda: [os.dup2(end, number) for end, number in zip(ends, (3, 4), strict=True)],
    )
    for end in (theirs_in, theirs_out, *ends):
        os.close(end)
    try:
        yield Tab(commands, answers)
    finally:
        browser.terminate()
        browser.wait(30)
        os.close(commands)
        os.close(answers)
