"""One cell of the judge's table: an implementation is asked a statement, in processes of
its own, and its results are held to the answer.
"""

from __future__ import annotations

import importlib.util
import linecache
import os
import resource
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from ringlab import reference
from ringlab.ring import launch as launcher
from ringlab.ring.layout import Layout, layout_named
from ringlab.ring.watch import RankFailed
from statements import STATEMENTS, Statement
from torch import Tensor
from torch.utils.checkpoint import checkpoint

TIMEOUT_S = 40.0
MEMORY = 24 << 30  # of addresses, most of which are never touched

OF_BACKWARDS = "expanded", "lse gradient", "two calls", "checkpoint"
RIGHT, REFUSED, NOT_OFFERED = "right", "refused", "not offered"
ABSENT, WRONG = "does not run here", "silently wrong"


@dataclass(frozen=True)
class Call:
    """What an adapter is handed: whole tensors, the same on every rank."""

    statement: Statement
    q: Tensor  # (batch, n, heads, width)
    k: Tensor  # (batch, n, kv_heads, width)
    v: Tensor
    sinks: Tensor | None
    rank: int = 0
    ranks: int = 1

    def layout(self, name: str = "contiguous") -> Layout:
        """Who owns which positions: "contiguous", "zigzag" or "striped"."""
        return layout_named(name, self.statement.n, self.ranks)

    def rows(self, layout: str = "contiguous") -> Tensor:
        """The positions that this rank owns."""
        return self.layout(layout).positions(self.rank)

    def shards(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v at these positions, as views of wider rows where strides are asked
        for.
        """
        cut = (x[:, rows] for x in (self.q, self.k, self.v))
        if self.statement.how == "strided":
            cut = (torch.cat([x, x], -1)[..., : x.shape[-1]] for x in cut)
        return tuple(cut)

    @property
    def limits(self) -> Tensor:
        """Where documents begin and end, int32 (documents + 1,), as ``cu_seqlens``."""
        lengths = self.statement.documents or (self.statement.n,)
        return torch.tensor([0, *lengths]).cumsum(0).int()


# out of the rows that the rank owns, these rows, and lse (batch, heads, rows) or None.
Result = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class Adapter:
    """How an implementation is called, and what it says that it offers."""

    name: str
    attend: Callable[[Call], Result]
    package: str = ""  # on PyPI, with its version; empty: a checkout or this library
    released: str = ""
    needs: tuple[str, ...] = ()  # other packages, with versions, that it imports
    # Modules that are imported once for all cells, in this order: doubles, slow ones.
    preload: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (2, 4)
    dtype: torch.dtype = torch.float32
    stands_in: str = ""  # which operators of a GPU the double computes
    # What it does not offer: the line of its documentation or source that says so.
    lacks: Mapping[str, str] = field(default_factory=dict)
    # Of these, what it takes all the same, so that it is asked.
    taken: tuple[str, ...] = ()
    conventions: str = ""  # what the adapter translates
    # The cause of what is wrong, by statement or "*": file, line and what happens there.
    causes: Mapping[str, str] = field(default_factory=dict)
    no_gradients: str = ""  # why no backward runs here, where none does
    # What it computes of an attention's out, where that is not out itself.
    translate: Callable[[Statement, Tensor], Tensor] = lambda statement, out: out
    only: tuple[str, ...] = ()  # of a control: the statements it is asked
    full_only: bool = False  # causality aside, statements are asked without it
    elsewhere: str = ""  # of an error that asks for a GPU which no double stands for
    control: str = ""  # the thread that tells the fault of this version

    def adapted(self, statement: Statement) -> Statement:
        """The statement as this implementation is asked it."""
        if self.full_only and statement.either:
            return replace(statement, causal=False)
        return statement

    def dtype_for(self, statement: Statement) -> torch.dtype:
        return torch.bfloat16 if "bf16" in statement.needs else self.dtype

    def cause(self, statement: str) -> str:
        return self.causes.get(statement) or self.causes.get("*", "")

    def lacking(self, statement: Statement) -> list[str]:
        """What a statement needs and it does not offer."""
        alone, needs = 1 in self.ranks, list(statement.needs)
        needs += ["many ranks"] * (alone and 2 not in statement.ranks)
        needs += ["chunks over ranks"] * (not alone and statement.how == "chunks")
        return [x for x in needs if self.lacks.get(x)]


@dataclass(frozen=True)
class Outcome:
    """What became of a cell."""

    status: str
    reason: str = ""
    errors: dict[str, float] = field(default_factory=dict)  # the largest over ranks
    allowed: dict[str, float] = field(default_factory=dict)
    ranks: int = 0  # of the run that is wrong, else of the last


class Refused(RuntimeError):
    """An implementation raised an error of its own making."""


class Broken(RuntimeError):
    """A call ended otherwise than by a refusal, or an import failed."""


def prepare(adapter: Adapter, folder: str) -> None:
    """Start a server of processes for an adapter, which imports its ``preload``."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, *sys.path]))
    launcher.server.cache_clear()
    server = launcher.server(os.getpid(), *launcher.MODULES)
    server.set_forkserver_preload([*launcher.MODULES, *adapter.preload])


def judged(adapter: Adapter, source: str, statement: Statement, folder: str) -> Outcome:
    """Run a cell. ``source``: where other processes find the adapter (``all_of``);
    ``folder``: where its packages lie.
    """
    statement = adapter.adapted(statement)
    lacking = adapter.lacking(statement)
    why = "; ".join(adapter.lacks[x] for x in lacking[:1])
    counts = [ranks for ranks in (1, *statement.ranks) if ranks in adapter.ranks]
    if not set(lacking) <= set(adapter.taken):
        return Outcome(NOT_OFFERED, why)
    if adapter.no_gradients and statement.how in OF_BACKWARDS:
        return Outcome(ABSENT, adapter.no_gradients)
    outcome = Outcome(NOT_OFFERED)
    for ranks in counts:
        try:
            args = source, adapter.name, statement.name, folder
            found = launcher.launch(results, ranks, *args, timeout_s=TIMEOUT_S)
        except (RankFailed, launcher.Ended) as failure:
            text = str(failure)
            absent = "Refused: " not in text or (
                adapter.elsewhere and adapter.elsewhere in text
            )
            reason = text.split("Refused: ")[-1].split("Broken: ")[-1]
            return Outcome(ABSENT if absent else REFUSED, reason)
        outcome = replace(compared(adapter, statement, found), ranks=ranks)
        if outcome.status == WRONG:
            break
    if outcome.status == WRONG and lacking:
        off = max(outcome.errors.values())
        far = f"off by {off:.2g}" if off < float("inf") else "not finite"
        said = f"{why}; taken without an error, {far}"
        return replace(outcome, status=NOT_OFFERED, reason=said)
    return outcome


def compared(adapter: Adapter, statement: Statement, found: list) -> Outcome:
    """Hold the results of all ranks, one dictionary per call, to the answer."""
    errors: dict[str, float] = {}
    allowed: dict[str, float] = {}
    for number, parts in enumerate(zip(*found)):
        inputs = statement.inputs(adapter.dtype_for(statement), number)
        answer = statement.answer(inputs, adapter.translate)
        allowed = statement.allowed(inputs)
        owned = torch.cat([part.pop("rows") for part in parts]).sort().values
        if owned.tolist() != list(range(statement.n)):
            raise ValueError(f"{adapter.name}: the ranks' rows are not the sequence")
        for name in parts[0]:
            whole, right = sum(part[name] for part in parts), answer[name]
            for entry, length in enumerate(statement.lengths):
                for t in (whole, right) if name in ("out", "lse") else ():
                    dim = 1 if name == "out" else 2
                    t[entry].narrow(dim - 1, length, statement.n - length).zero_()
            floor = 1.0
            if name.startswith("d"):
                scaled = (inputs[x] for x in ("q", "k", "dout"))
                floor = reference.gradient_floor(*scaled, statement.scale)
            error = reference.error(whole, right, floor)
            errors[name] = max(errors.get(name, 0.0), error)
    wrong = [name for name, error in errors.items() if not error <= allowed[name]]
    return Outcome(WRONG if wrong else RIGHT, ", ".join(wrong), errors, allowed)


# --------------------------------------------------------------------------------------
# in a process of its own


def results(source: str, name: str, asked: str, folder: str) -> list[dict[str, Tensor]]:
    """On each rank: what an adapter returns for a statement, as parts of whole tensors
    that add up over the ranks, in float64. Raises Refused or Broken.
    """
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1), os.dup2(silent, 2)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sys.path[:0] = [folder] * bool(folder)
    try:
        adapter = next(each for each in all_of(source) if each.name == name)
        for module in adapter.preload:
            importlib.import_module(module)
        return answers(adapter, adapter.adapted(STATEMENTS[asked]))
    except Exception as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        frames = traceback.extract_tb(error.__traceback__)
        last = frames[-1]
        gone = "torch/distributed" in last.filename or "/gloo/" in told
        if gone and type(error) is RuntimeError:
            raise  # another rank has gone
        line = linecache.getline(last.filename, last.lineno).strip()
        refused = line.startswith("raise ") or isinstance(error, AssertionError)
        # What torch raises inside of another package's call is no refusal of its own.
        refused &= "/torch/" not in last.filename or name.startswith("torch")
        kind = Refused if refused and not isinstance(error, ImportError) else Broken
        place = "/".join(Path(last.filename).parts[-3:])
        raise kind(f"{told} ({place}:{last.lineno})") from None


def all_of(source: Path | str) -> tuple[Adapter, ...]:
    """The tuple ``ADAPTERS`` of a Python file."""
    spec = importlib.util.spec_from_file_location(Path(source).stem, source)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.ADAPTERS


def answers(adapter: Adapter, statement: Statement) -> list[dict[str, Tensor]]:
    """Run the calls of a statement, and then their backwards, oldest first."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    calls = []
    for number in range(2 if statement.how == "two calls" else 1):
        inputs = statement.inputs(adapter.dtype_for(statement), number)
        sinks = inputs["sinks"] if statement.sinks else None
        leaves = [inputs[x] for x in "qkv"] + [sinks] * statement.sinks
        for leaf in leaves:
            leaf.requires_grad_(not adapter.no_gradients and statement.how != "chunks")

        def attend(q, k, v, sinks=None):
            return adapter.attend(Call(statement, q, k, v, sinks, rank, ranks))

        if statement.how == "checkpoint":
            out, rows, lse = checkpoint(attend, *leaves, use_reentrant=False)
        else:
            out, rows, lse = attend(*leaves)
        calls.append((inputs, leaves, out, rows, lse))
    return [parts_of(statement, *call) for call in calls]


def parts_of(statement: Statement, inputs, leaves, out, rows, lse) -> dict[str, Tensor]:
    """One call's results: its rows of out and lse, and what it adds to the gradients."""
    dout = inputs["dout"]
    if rows.max() >= statement.n:  # what an adapter has padded
        kept = rows < statement.n
        rows, out = rows[kept], out[:, kept]
    parts = {"rows": rows, "out": torch.zeros(dout.shape, dtype=torch.float64)}
    parts["out"][:, rows] = out.detach().double()
    if lse is not None:
        parts["lse"] = torch.zeros(inputs["dlse"].shape, dtype=torch.float64)
        parts["lse"][:, :, rows] = lse.detach().double()
    if not leaves[0].requires_grad:
        return parts
    results, gradients = [out], [dout[:, rows]]
    if statement.how == "expanded":
        gradients = [torch.ones((), dtype=out.dtype).expand_as(out)]
    if statement.how == "lse gradient":
        results.append(lse)
        gradients.append(inputs["dlse"][:, :, rows].to(lse.dtype))
    torch.autograd.backward(results, gradients)
    for name, leaf in zip(("q", "k", "v", "sinks"), leaves):
        none = torch.zeros_like(leaf)
        parts[f"d{name}"] = (none if leaf.grad is None else leaf.grad).double()
    return parts
