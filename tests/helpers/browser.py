"""JupyterLab and a headless Chromium for the tests: a server on a free port, and a page driven through DevTools."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from ringlab.report import pdf, places

LIB = Path(__file__).resolve().parents[2] / "lib"
TOKEN = "a-token-of-the-tests"


def browser() -> list[str]:
    """The command of a Chromium; the test is skipped where there is none, or nothing to drive it with."""
    pytest.importorskip("websocket", reason="driving a browser needs websocket-client")
    try:
        return pdf.chromium()
    except places.UsageError as error:
        pytest.skip(str(error))


@contextlib.contextmanager
def ended(command, **more):
    """A process in a group of its own, which ends with the block."""
    process = subprocess.Popen(command, start_new_session=True, **more)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def until(found, seconds: float, what: str):
    """What ``found`` returns once it is true."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, f"no {what} within {seconds:g} s"
        time.sleep(0.1)
    return value


@contextlib.contextmanager
def jupyterlab(folder: Path, notebook: Path, startup: str):
    """JupyterLab over a copy of a notebook in ``folder``, with settings of its own; yields the notebook's address.

    Its kernels run the Python text ``startup`` first.
    """
    shutil.copy(notebook, folder)
    place = folder / "jupyter"
    names = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
    own = {f"JUPYTER_{name}": str(place / name) for name in names} | {"IPYTHONDIR": str(place / "ipython")}
    own |= {f"JUPYTERLAB_{name}": str(place / name) for name in ("SETTINGS_DIR", "WORKSPACES_DIR")}
    first = place / "ipython" / "profile_default" / "startup" / "first.py"
    first.parent.mkdir(parents=True)
    first.write_text(startup)
    with places.own_jupyter(**own):
        env = os.environ | {"PYTHONPATH": str(LIB), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        command = [
            sys.executable, "-m", "jupyterlab", f"--notebook-dir={folder}", "--no-browser", "--allow-root",
            "--expose-app-in-browser", "--port=0", f"--IdentityProvider.token={TOKEN}", "--ServerApp.ip=127.0.0.1",
        ]  # fmt: skip
        settings = place / "SETTINGS_DIR" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
        settings.parent.mkdir(parents=True)
        settings.write_text('{"fetchNews": "false"}')  # or it asks, over what is shown
        log = (folder / "jupyter.log").open("w")
        with log, ended(command, stdout=log, stderr=subprocess.STDOUT, env=env):
            said = until(lambda: list((place / "RUNTIME_DIR").glob("jpserver-*.json")), 60, "JupyterLab")
            url = until(lambda: said[0].read_text() and json.loads(said[0].read_text())["url"], 10, "address")
            yield f"{url}lab/tree/{notebook.name}?token={TOKEN}&reset"


class Page:
    """A page of a headless Chromium: ``js`` evaluates an expression in it."""

    def __init__(self, websocket):
        self.socket, self.count = websocket, 0

    def call(self, method: str, **parameters) -> dict:
        self.count += 1
        self.socket.send(json.dumps({"id": self.count, "method": method, "params": parameters}))
        while (reply := json.loads(self.socket.recv())).get("id") != self.count:
            pass
        assert "error" not in reply, reply
        return reply["result"]

    def js(self, expression: str, wait: bool = True):
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=wait, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]["exception"].get("description")
        return found["result"].get("value")

    def until(self, expression: str, seconds: float = 60):
        return until(lambda: self.js(expression), seconds, f"{expression} in the page")


@contextlib.contextmanager
def chromium(browser: list[str], folder: Path, url: str):
    """A headless Chromium that shows an address."""
    import websocket

    profile = folder / "chromium"
    command = [
        *browser, "--headless=new", "--disable-gpu", "--remote-debugging-port=0", "--remote-allow-origins=*",
        "--no-first-run", "--disable-background-networking", "--disable-extensions", f"--user-data-dir={profile}",
        "--window-size=1280,2400", *(["--no-sandbox"] if os.geteuid() == 0 else []), url,
    ]  # fmt: skip
    with ended(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        port = profile / "DevToolsActivePort"
        until(lambda: port.is_file() and len(port.read_text().split()) > 1, 30, "Chromium")
        listed = f"http://127.0.0.1:{port.read_text().split()[0]}/json"

        def page():
            with urllib.request.urlopen(listed, timeout=5) as answer:
                pages = [p for p in json.load(answer) if p["type"] == "page"]
            return pages and pages[0]["webSocketDebuggerUrl"]

        with contextlib.closing(websocket.create_connection(until(page, 30, "page"), timeout=60)) as socket:
            yield Page(socket)
