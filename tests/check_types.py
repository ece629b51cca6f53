"""Check types, for `make lint`: pyright on the code that users see (README, tutorials, what
`advise` prints) and on how many public names are typed whole; pyrefly on the library.
"""

import json
import os
import re
import subprocess
import sys
from inspect import isclass, ismodule
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
TYPED = 0.98  # of the public names and of the members of their classes, at least


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


def pyright(folder: str | Path, *arguments: str) -> dict:
    """Return what pyright reports of this tree, with the packages of this Python."""
    command = [sys.executable, "-m", "basedpyright", "--outputjson", *arguments]
    # The first Python of PATH is asked: --verifytypes takes no --pythonpath.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT / "lib")}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    return json.loads(done.stdout)


def public_types() -> dict[str, bool]:
    """Whether the type is known of all that is public: the names of ``ringlab`` and of
    its public modules, and the members of the classes among them.

    A name counts as known where all is that its type refers to.
    """
    report = pyright(ROOT, "--verifytypes", "ringlab", "--ignoreexternal")
    known = {
        x["name"]: x["isTypeKnown"] and not x["isTypeAmbiguous"]
        for x in report["typeCompleteness"]["symbols"]
    }
    modules = filter(ismodule, map(vars(ringlab).get, ringlab.__all__))
    public = {}
    for module in [ringlab, *modules]:
        for name in getattr(module, "__all__", vars(module)):
            public[f"{module.__name__}.{name}"] = getattr(module, name)
    public = {name: value for name, value in public.items() if name in known}
    classes = filter(isclass, public.values())
    members = tuple(f"{x.__module__}.{x.__qualname__}." for x in classes)
    return {x: known[x] for x in known if x in public or x.startswith(members)}


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
    types = public_types()
    share = sum(types.values()) / len(types)
    unknown = ", ".join(name for name, known in types.items() if not known)
    print(
        f"{share:.1%} of {len(types)} public names are typed; not: {unknown or 'none'}"
    )
    command = [sys.executable, "-m", "pyrefly", "check", "--preset", "basic"]
    command += ["--python-interpreter-path", sys.executable, str(ROOT / "lib/ringlab")]
    failed = bool(found) or share < TYPED
    return subprocess.run(command).returncode or failed


if __name__ == "__main__":
    sys.exit(main())
