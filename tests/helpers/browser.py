"""JupyterLab and a headless Chromium for the tests: a server on a free port, and a page
driven through DevTools.
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LIB = Path(__file__).resolve().parents[2] / "lib"


def browser() -> list[str]:
    """The command of a Chromium, $CHROMIUM or the first of NAMES; the test is skipped
    where there is none, or nothing to drive it with.
    """
    pytest.importorskip("websocket", reason="driving a browser needs websocket-client")
    named = shlex.split(os.environ.get("CHROMIUM", ""))
    found = named or [*filter(None, map(shutil.which, NAMES))][:1]
    if not found:
        pytest.skip("no Chromium or Chrome here")
    return found


@contextlib.contextmanager
def ended(command, **more):
    """A process in a group of its own, which ends with the block."""
    process = subprocess.Popen(command, start_new_session=True, **more)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def until(found, seconds: float, what: str):
    """What ``found`` returns once it is true."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, f"no {what} within {seconds:g} s"
        time.sleep(0.1)
    return value


@contextlib.contextmanager
def jupyterlab(folder: Path, notebook: Path):
    """JupyterLab over a copy of a notebook in ``folder``, its home; yields the
    notebook's address.
    """
    shutil.copy(notebook, folder)
    settings = (
        folder
        / ".jupyter"
        / "lab"
        / "user-settings"
        / "@jupyterlab"
        / "apputils-extension"
    )
    settings /= "notification.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text('{"fetchNews": "false"}')  # or it asks, over what is shown
    env = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("JUPYTER", "IPYTHON", "XDG_"))
    }
    (folder / "rfc3987_syntax.py").write_text("raise ImportError")  # as in conftest.py
    env |= {
        "HOME": str(folder),
        "PYTHONPATH": f"{LIB}:{folder}",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        f"--notebook-dir={folder}",
        "--no-browser",
        "--allow-root",
        "--expose-app-in-browser",
        "--port=0",
        "--ServerApp.ip=127.0.0.1",
    ]
    with (
        (folder / "jupyter.log").open("w") as log,
        ended(command, stdout=log, stderr=subprocess.STDOUT, env=env),
    ):
        said = until(lambda: [*folder.rglob("jpserver-*.json")], 60, "JupyterLab")
        server = json.loads(until(said[0].read_text, 10, "address"))
        yield f"{server['url']}lab/tree/{notebook.name}?token={server['token']}&reset"


class Page:
    """A page of a headless Chromium: ``js`` evaluates an expression in it."""

    def __init__(self, websocket):
        self.socket, self.count = websocket, 0

    def call(self, method: str, **parameters) -> dict:
        self.count += 1
        self.socket.send(
            json.dumps({"id": self.count, "method": method, "params": parameters})
        )
        while (reply := json.loads(self.socket.recv())).get("id") != self.count:
            pass
        assert "error" not in reply, reply
        return reply["result"]

    def js(self, expression: str, wait: bool = True):
        found = self.call(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=wait,
            returnByValue=True,
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"][
            "exception"
        ].get("description")
        return found["result"].get("value")

    def until(self, expression: str, seconds: float = 60):
        return until(lambda: self.js(expression), seconds, f"{expression} in the page")


@contextlib.contextmanager
def chromium(browser: list[str], folder: Path, url: str):
    """A headless Chromium that shows an address."""
    import websocket

    profile = folder / "chromium"
    command = [
        *browser,
        "--headless=new",
        "--disable-gpu",
        "--remote-debugging-port=0",
        "--remote-allow-origins=*",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-extensions",
        f"--user-data-dir={profile}",
        "--window-size=1280,2400",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        url,
    ]
    with ended(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        port = profile / "DevToolsActivePort"
        until(
            lambda: port.is_file() and len(port.read_text().split()) > 1, 30, "Chromium"
        )
        listed = f"http://127.0.0.1:{port.read_text().split()[0]}/json"

        def page():
            with urllib.request.urlopen(listed, timeout=5) as answer:
                pages = [p for p in json.load(answer) if p["type"] == "page"]
            return pages and pages[0]["webSocketDebuggerUrl"]

        with contextlib.closing(
            websocket.create_connection(until(page, 30, "page"), timeout=60)
        ) as socket:
            yield Page(socket)
