"""Live tensor storages as the tracker counts them, and the process's high-water mark."""

import pytest
import torch
from ringlab.memory import MemoryPool
from ringlab.tracking import LiveStorageTracker


def test_peak_of_a_chain_of_ops_is_the_hand_computed_one():
    n = 1000  # 4000 bytes each
    with LiveStorageTracker() as tracker:
        a = torch.ones(n)  # a
        b = a + 1  # a b
        c = b * 2  # a b c: the peak, 12000
        assert tracker.current_bytes == 12000
        del b
        assert tracker.current_bytes == 8000
        d = c.view(10, 100)[:, ::2].t()  # nothing
        c.add_(1).mul_(2)  # nothing
        e = d.sum()  # 4 more
        assert tracker.current_bytes == 8004
        del c, d
        assert tracker.current_bytes == 4004
    assert tracker.peak_bytes == 12000
    del a, e
    assert tracker.current_bytes == 0 and tracker.peak_bytes == 12000
    with tracker:  # again: what was freed is forgotten
        f = torch.ones(4000)[3:4]  # a view keeps its whole storage alive
        assert tracker.current_bytes == tracker.peak_bytes == 16000
        del f
        for i in range(
            1, 200
        ):  # addresses given away again are not taken for the old storages
            t = torch.ones(i)
            assert tracker.current_bytes == 4 * i
            del t
    assert tracker.peak_bytes == 16000 and tracker.current_bytes == 0


def test_memory_from_before_counts_once_and_only_when_registered():
    x, other = torch.ones(1000), torch.ones(1000)
    with LiveStorageTracker() as tracker:
        other.view(10, 100).add_(1)
        assert tracker.peak_bytes == 0
        tracker.register(x, x[5:], x)
        assert tracker.current_bytes == 4000
        x.view(10, 100).add_(1)
        assert tracker.current_bytes == 4000
        x = x + other
    assert tracker.peak_bytes == 8000 and tracker.current_bytes == 4000
    with pytest.raises(TypeError, match="expected tensors, got list"):
        tracker.register([x])


def test_out_arguments_resizes_constructors_and_sparse_tensors():
    a = torch.ones(1000)
    empty = torch.empty(0)
    with LiveStorageTracker() as tracker:
        torch.add(a, a, out=empty)  # grows
        assert tracker.current_bytes == 4000
        empty.resize_(2000)
        assert tracker.current_bytes == 8000
        empty.untyped_storage().resize_(0)
        t = torch.tensor([1.0, 2.0])
        assert tracker.peak_bytes == 8008
        del t
        torch.split(torch.ones(1000), 10)  # many outputs, one storage
        assert tracker.peak_bytes == 12000
        del empty
        s = torch.sparse_coo_tensor(
            torch.zeros(2, 5, dtype=torch.int64), torch.ones(5), (4, 4)
        )
        assert tracker.current_bytes == 2 * 5 * 8 + 5 * 4, (
            "all parts of a sparse tensor"
        )
        del s
        assert tracker.current_bytes == 0


def test_backward_is_seen():
    n = 1000
    x = torch.ones(n, requires_grad=True)
    with LiveStorageTracker() as tracker:
        tracker.register(x)
        y = x.exp()  # x y, and y is saved
        loss = y.sum()  # + 4
        del y
        assert tracker.current_bytes == 8004 == tracker.peak_bytes  # the graph holds y
        loss.backward()  # + ones_like(loss) 4, + grad * y 4000
        assert tracker.peak_bytes == 12008
        del loss
        assert tracker.current_bytes == 8000  # x and x.grad: y went with the graph
    x.grad = None
    assert tracker.current_bytes == 4000


def test_nested_trackers_each_see_the_ops_inside():
    with LiveStorageTracker() as outer:
        a = torch.ones(1000)
        with LiveStorageTracker() as inner:
            b = a + 1
            del b
        with outer:  # entered again: still counted once
            c = a + 1
        del a, c
    assert (outer.peak_bytes, inner.peak_bytes, outer.current_bytes) == (8000, 4000, 0)


def test_pool_memory_is_seen_by_the_tracker():
    pool = MemoryPool(threshold_bytes=0)
    with LiveStorageTracker() as tracker:
        for _ in range(3):
            pool.lend((16, 16)).fill_(1)[2:].add_(1)
        assert pool.stats().reuses == 2  # watching changes nothing
        assert tracker.current_bytes == tracker.peak_bytes == 1024
        pool.clear()
        assert tracker.current_bytes == 0
