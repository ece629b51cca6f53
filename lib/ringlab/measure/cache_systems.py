"""The system that measures the pattern cache: plans built and looked up."""

from torch import Tensor

from .. import baselines
from ..block_patterns import BlockSparse
from ..cache import PatternCache
from ..cost import Cost
from ..engine import blocks, execute, walk
from ..engine.dilated import make_plan
from ..kernels.compiled import Walk
from ..tiles.patterns import Tables, tables_of
from .points import Point
from .systems import Checked, Output, System, choose_kernel, parse_options, way_of


class PlanBuild(System):
    """The plan of one attention call through a cache, without the attention, and so
    without FLOPs and a roofline; options ``gather``, ``blocks``, ``warm``.

    ``gather``, ``blocks``: those of a way of ``baselines`` that copies, which are index
    tensors. ``warm=False`` clears the cache before every call, so that each
    builds anew. The check: attention by this plan equals the float64 reference.
    """

    def __init__(self, point: Point, device):
        options = parse_options(point, "gather", "blocks", "warm")
        super().__init__(point.but(passes="fwd"), device)
        self.cost = Cost(0, 0, 0, 0, 0)
        self.warm = options.get("warm", True)
        self.kernel = choose_kernel(point, device).kernel
        self.cache = PatternCache()
        self.key = self.pattern, point.seq_len, point.heads, point.kv_heads
        self.make = make_plan
        self.execute = execute.forward
        if (way := way_of(point)) in baselines.COPIES:
            self.key += point.causal, self.device, way
            self.make = baselines.rows_to_copy
            self.execute = baselines.copied_forward
        elif self.kernel.name == "compiled":
            n = point.seq_len
            sizes = point.batch, n, point.heads, n, point.kv_heads
            self.key = self.pattern, sizes, point.causal
            self.make = tables_of
            self.execute = walked
        elif isinstance(self.pattern, BlockSparse):
            self.key += (point.causal,)
            self.make = blocks.make_plan

    def inputs(self) -> list[Tensor]:
        return []

    def run(self, inputs) -> Output:
        if not self.warm:
            self.cache.clear()
        return BuiltPlan(self, self.cache.get(self.key, lambda: self.make(*self.key)))

    def check(self, inputs, output) -> Checked:
        return super().check(super().inputs(), Output(**output.named()))


def walked(q, k, v, plan: Tables, causal: bool, scale: float, kernel, pool):
    """Return out and lse of walks of the tables, in which ``causal`` stands."""
    walks = [Walk(table, scale) for table in plan.tables]
    return walk.forward(walks, q, k, v, plan.covered)


class BuiltPlan(Output):
    """A plan as an output: ``named`` runs the attention by it, which tells whether it is
    right.
    """

    def __init__(self, system: PlanBuild, plan):
        self.system = system
        self.plan = plan
        self.counted = {}

    def named(self) -> dict[str, Tensor]:
        system = self.system
        call = system.point.causal, system.point.head_dim**-0.5, system.kernel
        q, k, v = System.inputs(system)
        results = system.execute(q, k, v, self.plan, *call, pool=None)
        return dict(zip(("out", "lse"), results))
