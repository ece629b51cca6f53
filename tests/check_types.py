"""Check types, for `make lint`: pyright on the code that users see (README, tutorials, what
`advise` prints) and on how much of the public names is typed; pyrefly on the library.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import ringlab

ROOT = Path(__file__).resolve().parents[1]
ASKED = [  # what `advise` is asked: one device, ranks, training of each kind of pattern
    {"profile": "gtx1080", "seq_len": 131_072},
    {"profile": "cpu", "seq_len": 16_384, "need": "far"},
    {"profile": "h100", "seq_len": 1 << 20, "ranks": 4, "causal": True},
    {"profile": "rtx4090", "seq_len": 1 << 17, "need": "local", "passes": "fwd"},
    {"profile": "t4", "seq_len": 65_536, "pattern": ringlab.ladder(65_536)},
]


def shown() -> dict[str, str]:
    """The code that users see, by file name."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = {"readme.py": "\n".join(re.findall(r"```python\n(.*?)```", readme, re.S))}
    for path in (ROOT / "notebooks" / "tutorials").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        sources = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
        code[f"tutorial_{path.stem}.py"] = "\n\n".join(sources)
    for i, asked in enumerate(ASKED):
        code[f"advised_{i}.py"] = ringlab.advise(**asked).code()
    return code


def pyright(folder: str, *arguments: str) -> dict:
    command = [sys.executable, "-m", "basedpyright", "--outputjson", *arguments]
    command += ["--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return json.loads(done.stdout)


def main() -> int:
    paths = [str(ROOT / name) for name in ("lib", "notebooks/quality")]
    config = {"typeCheckingMode": "basic", "include": ["."], "extraPaths": paths}
    with TemporaryDirectory() as folder:
        for name, text in shown().items():
            Path(folder, name).write_text(text, encoding="utf-8")
        Path(folder, "pyrightconfig.json").write_text(json.dumps(config))
        found = pyright(folder)["generalDiagnostics"]
    for each in found:
        line = each["range"]["start"]["line"] + 1
        print(f"{Path(each['file']).name}:{line}: {each['message']}")
    command = [sys.executable, "-m", "pyrefly", "check", "--preset", "basic"]
    command += ["--python-interpreter-path", sys.executable, str(ROOT / "lib/ringlab")]
    return bool(found) or subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
