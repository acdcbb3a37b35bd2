"""Gathering, padding, reducing, broadcasting; and every sample once for metrics."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from accelight.state import (
    AcceleratorState,
    DistributedType,
    GradientState,
    PartialState,
    broadcast,
    broadcast_object_list,
    gather,
    gather_for_metrics,
    gather_object,
    pad_across_processes,
    reduce,
)
from tests.ranks import run_on_ranks

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3])


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


ORDERED = (torch.float32, torch.bfloat16, torch.float64, torch.int16, torch.uint8, torch.int64)


def broadcast_from_last(rank: int) -> Any:
    """Return what `broadcast` returns; the tensors that were given have the values, too."""
    learned = torch.full((2,), float(rank), requires_grad=True)
    given = {
        "transposed": (torch.arange(6).view(2, 3) + rank).T,
        "dtypes": [torch.tensor(rank).to(dtype) for dtype in (*ORDERED, torch.bool, torch.complex64)],
        "empty": torch.ones(0, rank + 1)[:, :1],
        "learned": learned,
    }
    returned = broadcast(given, from_process=PartialState().num_processes - 1)
    assert returned is given
    assert learned.requires_grad
    assert learned.is_leaf
    return {**returned, "learned": learned.detach()}


def mappings(number: int) -> list[Any]:
    one = torch.tensor([number])
    return [defaultdict(list, x=one), Counted({"x": one}), UserDict(x=one), MappingProxyType({"x": one})]


class Counted(OrderedDict[str, Any]):
    """Like outputs of transformers, its values change one by one only."""

    def update(self, *_: Any) -> None:  # type: ignore[override]
        raise NotImplementedError


def gather_everything() -> dict[str, Any]:
    rank = PartialState().process_index
    nested = {"a": [torch.tensor([[rank]]), (torch.tensor(rank),)], "b": Pair(torch.tensor([True]), torch.ones(1, 0))}
    learned = torch.full((2,), float(rank), requires_grad=True)
    found: dict[str, Any] = {
        "nested": gather(nested),
        "uneven": gather(torch.arange(rank * 10, rank * 11)),
        "learned": gather(learned),
        "dtypes": [
            gather(torch.tensor([rank]).to(dtype))
            for dtype in (torch.int16, torch.uint8, torch.bool, torch.bfloat16, torch.complex64, torch.float64)
        ],
        "transposed": gather(torch.arange(6).view(2, 3).T + rank),
        "mappings": [gather(one) for one in mappings(rank)],
        "many": gather([torch.arange(n % 3 + rank) for n in range(40)]),
        "objects": gather_object([f"from {rank}", {"rank": rank}]),
        "no objects": gather_object([]),
        "sum": reduce({"x": torch.tensor([1, rank])}, "sum"),
        "mean": reduce(torch.tensor([1.0, rank])),
        "mean of ints": reduce(torch.tensor(rank), "mean"),
        "bools": reduce(torch.tensor([True]), "sum"),
        "shorts": reduce(torch.tensor([300], dtype=torch.int16), "sum"),
        "scaled": reduce(torch.tensor(2.0), "sum", scale=0.5),
        "none": reduce(torch.tensor(2.0), "none"),
        "max": reduce([torch.tensor([3 - rank, rank], dtype=dtype) for dtype in ORDERED], "max"),
        "nan": reduce(torch.full((3,), 1.0 if rank else torch.nan), "max"),
        "conjugated": gather(torch.tensor([1j * (rank + 1)]).conj()),
        "negated": broadcast(torch.tensor([1j * (rank + 1)]).conj().imag),
        "any": reduce(torch.tensor([rank == 0, False]), "max"),
        "broadcast": broadcast_object_list([rank, f"of {rank}"], from_process=PartialState().num_processes - 1),
        "broadcast nothing": broadcast_object_list([]),
        "broadcast tensors": broadcast_from_last(rank),
        "padded": pad_across_processes([torch.ones(rank + 1, 2), torch.tensor(3)], pad_index=7),
        "padded first": pad_across_processes(torch.ones(2, rank + 1), dim=-1, pad_first=True),
    }
    assert found["learned"].requires_grad is False
    kept = torch.ones(1)
    reduce(kept, "sum")
    reduce(kept, "mean", scale=3.0)
    assert kept.item() == 1
    return found


@WORLD_SIZES
def test_collectives(world_size: int) -> None:
    n, ranks = world_size, list(range(world_size))
    for rank, found in enumerate(run_on_ranks(world_size, gather_everything)):
        nested = found["nested"]
        assert nested["a"][0].tolist() == [[r] for r in ranks]
        assert nested["a"][1][0].tolist() == ranks
        assert type(nested["b"]) is Pair
        assert [one["x"].tolist() for one in found["mappings"]] == [ranks] * 4
        assert [type(one) for one in found["mappings"]] == [defaultdict, Counted, UserDict, dict]
        assert nested["b"].x.tolist() == [True] * n
        assert nested["b"].y.shape == (n, 0)
        assert found["uneven"].tolist() == [x for r in ranks for x in range(r * 10, r * 11)]
        assert found["learned"].tolist() == [r for r in ranks for _ in range(2)]
        for tensor in found["dtypes"]:
            assert torch.equal(tensor, torch.tensor(ranks).to(tensor.dtype))
        assert torch.equal(found["transposed"], torch.cat([torch.arange(6).view(2, 3).T + r for r in ranks]))
        assert [len(tensor) for tensor in found["many"]] == [sum(k % 3 + r for r in ranks) for k in range(40)]
        assert found["objects"] == [item for r in ranks for item in (f"from {r}", {"rank": r})]
        assert found["no objects"] == []
        assert found["sum"]["x"].tolist() == [n, sum(ranks)]
        assert found["mean"].tolist() == [1.0, sum(ranks) / n]
        assert found["mean of ints"].item() == sum(ranks) / n
        assert found["bools"].tolist() == [n]
        assert found["shorts"].tolist() == [300 * n]
        assert found["scaled"].item() == n
        assert found["none"].item() == 2
        assert found["broadcast"] == [n - 1, f"of {n - 1}"]
        assert found["broadcast nothing"] == []
        assert [tensor.tolist() for tensor in found["max"]] == [[3, n - 1]] * len(ORDERED)
        assert [tensor.dtype for tensor in found["max"]] == list(ORDERED)
        assert found["nan"].isnan().all()
        assert found["conjugated"].tolist() == [-1j * (rank + 1) for rank in range(n)]
        assert found["negated"].tolist() == [-1.0]
        assert found["any"].tolist() == [True, False]
        sent = found["broadcast tensors"]
        assert torch.equal(sent["transposed"], (torch.arange(6).view(2, 3) + n - 1).T)
        for tensor in sent["dtypes"]:
            assert torch.equal(tensor, torch.tensor(n - 1).to(tensor.dtype))
        assert sent["learned"].tolist() == [n - 1.0] * 2
        assert found["padded"][0][:, 0].tolist() == [1.0] * (rank + 1) + [7.0] * (n - rank - 1)
        assert found["padded"][1].item() == 3
        assert found["padded first"].tolist() == [[0.0] * (n - rank - 1) + [1.0] * (rank + 1)] * 2


def disagree() -> list[str]:
    rank = PartialState().process_index
    attempts = [
        lambda: gather(torch.ones(2, 2 + rank)),
        lambda: gather(torch.ones(2, dtype=torch.float32 if rank else torch.float64)),
        lambda: gather([torch.ones(2)] * (1 + rank)),
        lambda: gather(torch.ones(1)) if rank else reduce(torch.ones(1)),
        lambda: reduce(torch.ones(2 + rank)),
        lambda: gather_object([1]) if rank else gather(torch.ones(1)),
        lambda: broadcast_object_list([None] * (1 + rank)),
        lambda: broadcast_object_list([1], from_process=rank),
        lambda: reduce(torch.ones(1), "max" if rank else "sum"),
        lambda: broadcast(torch.ones(1), from_process=rank),
        lambda: broadcast(torch.ones(1 + rank)),
    ]
    told = []
    for attempt in attempts:
        with pytest.raises(ValueError, match="do not communicate the same data") as caught:
            attempt()
        told.append(str(caught.value))
    with pytest.raises(ValueError, match=r"from_process=2 is out of range: there are 2 process"):
        broadcast_object_list([1], from_process=2)
    with pytest.raises(ValueError, match=r"from_process=-1 is out of range: there are 2 process"):
        broadcast(torch.ones(1), from_process=-1)
    return told


def test_what_differs_between_processes_is_an_error_on_all_and_not_a_hang() -> None:
    first, second = run_on_ranks(2, disagree, timeout_s=20)
    assert first == second
    assert "process 0: gather(data: float32[*, 2])\nprocess 1: gather(data: float32[*, 3])" in first[0]
    assert "process 0: gather(data: float64[*])\nprocess 1: gather(data: float32[*])" in first[1]
    assert "process 0: broadcast(from process 0; data: float32[1])\nprocess 1: broadcast(from process 1;" in first[9]
    assert "process 1: gather(data[0]: float32[*]; data[1]: float32[*])" in first[2]
    assert "process 0: reduce(by 'mean'; data: float32[1])\nprocess 1: gather(data: float32[*])" in first[3]


def pad_uneven_ones() -> dict[str, torch.Tensor]:
    rank = PartialState().process_index
    uneven = {"rows": torch.full((rank + 1, 2 - rank % 2, 1), float(rank)), "flat": torch.arange(rank + 1)}
    found = pad_across_processes(uneven, dim=1, pad_index=-1)
    return {**found, "joined": gather(found["rows"])}


@WORLD_SIZES
def test_sizes_along_other_dimensions_may_differ(world_size: int) -> None:
    for rank, found in enumerate(run_on_ranks(world_size, pad_uneven_ones)):
        assert found["flat"].tolist() == list(range(rank + 1))  # has no dimension 1, and stays
        assert found["rows"].tolist() == [[[rank], [rank if rank % 2 == 0 else -1]]] * (rank + 1)
        assert len(found["joined"]) == sum(range(1, world_size + 1))


def raise_everywhere() -> None:
    assert PartialState().num_processes >= 1
    for function in (gather, reduce, pad_across_processes, broadcast):
        with pytest.raises(TypeError, match=r"data\['x'\]\[1\] is str, but only tensors can be sent"):
            function({"x": [torch.ones(1), "text"]})
        with pytest.raises(TypeError, match=r"data is a torch.sparse_coo tensor on cpu: only dense tensors"):
            function(torch.ones(2, 2).to_sparse())
    with pytest.raises(ValueError, match="reduction must be one of 'mean', 'sum', 'max', 'none'; got 'min'"):
        reduce(torch.ones(1), "min")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"data is torch\.complex64, which has no largest value"):
        reduce(torch.ones(1, dtype=torch.complex64), "max")
    with pytest.raises(TypeError, match=r"gather_object expects a list, got dict. Write gather_object\(\[thing\]\)"):
        gather_object({})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="fills a list in place, got tuple"):
        broadcast_object_list((1,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expects tensors, or a list with one item per sample, got dict"):
        gather_for_metrics({"x": "text"})
    if PartialState().num_processes > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import distribute_tensor

        mesh = init_device_mesh("cpu", (PartialState().num_processes,))
        with pytest.raises(TypeError, match=r"data is a DTensor: call .full_tensor\(\)"):
            gather(distribute_tensor(torch.ones(4), mesh))


@pytest.mark.parametrize("world_size", [1, 2])
def test_inputs_that_cannot_be_gathered_are_refused(world_size: int) -> None:
    run_on_ranks(world_size, raise_everywhere)


def make_loader(
    length: int, batch_size: int, drop_last: bool, sampler_drop_last: bool, group_size: int = 1
) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(length))
    state = PartialState()
    num_replicas, rank = state.num_processes // group_size, state.process_index // group_size
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, num_replicas, rank, shuffle=False, drop_last=sampler_drop_last
    )
    return DataLoader(data, batch_size=batch_size, sampler=sampler, drop_last=drop_last)


def evaluate(loader: Any) -> tuple[list[int], list[str], list[int], int]:
    """Go through a loader, gathering tensors, objects and one scalar per process."""
    state = GradientState()
    samples: list[int] = []
    names: list[str] = []
    losses: list[int] = []
    remainder = -1
    for (batch,) in state.track(loader):
        gathered = gather_for_metrics({"x": batch, "y": [batch * 2]})
        assert torch.equal(gathered["y"][0], gathered["x"] * 2)
        samples += gathered["x"].tolist()
        names += gather_for_metrics([str(x) for x in batch.tolist()])
        losses.append(len(gather_for_metrics(torch.zeros(7))))
        remainder = state.remainder
    return samples, names, losses, remainder


def evaluate_all_layouts() -> dict[tuple[int, int], tuple[list[int], list[str], list[int], int]]:
    return {
        (length, batch_size): evaluate(make_loader(length, batch_size, False, False))
        for length in range(1, 21)
        for batch_size in range(1, 6)
    }


@pytest.mark.core("2")
@WORLD_SIZES
def test_every_sample_once_and_in_order_for_every_length_and_batch_size(world_size: int) -> None:
    for results in run_on_ranks(world_size, evaluate_all_layouts, timeout_s=120):
        for (length, batch_size), (samples, names, losses, remainder) in results.items():
            assert samples == list(range(length)), (length, batch_size)
            assert names == [str(sample) for sample in range(length)]
            assert set(losses) == {7 * world_size}  # not one row a sample: kept whole
            assert remainder == -length % world_size


def evaluate_dropping() -> dict[tuple[int, int, bool], tuple[list[int], int]]:
    found = {}
    for length in range(1, 21):
        for batch_size in range(1, 6):
            for sampler_drops in (False, True):
                loader = make_loader(length, batch_size, not sampler_drops, sampler_drops)
                samples, _, _, remainder = evaluate(loader)
                found[length, batch_size, sampler_drops] = samples, remainder
    return found


@pytest.mark.exhaustive
@WORLD_SIZES
def test_no_sample_twice_where_the_loader_or_the_sampler_drops_the_last_ones(world_size: int) -> None:
    for results in run_on_ranks(world_size, evaluate_dropping, timeout_s=120):
        for (length, batch_size, sampler_drops), (samples, remainder) in results.items():
            per_process = length // world_size if sampler_drops else -(-length // world_size)
            if not sampler_drops:
                per_process -= per_process % batch_size
            assert samples == list(range(min(length, per_process * world_size)))
            if per_process:
                assert remainder == max(0, per_process * world_size - length)


def share_batches(group_size: int) -> None:
    """Do as a strategy whose processes share copies of the model."""
    config = SimpleNamespace(non_data_parallel_size=group_size)
    AcceleratorState._fill(mixed_precision="no", distributed_type=DistributedType.FSDP, parallelism_config=config)


def evaluate_in_groups(group_size: int) -> list[Any]:
    share_batches(group_size)
    found: list[Any] = [
        evaluate(make_loader(length, batch_size, drop_last, False, group_size))[:2]
        for length in range(1, 10)
        for batch_size in range(1, 4)
        for drop_last in (False, True)
    ]
    state = PartialState()
    with state.split_between_processes(["a", "b", "c"]) as mine:
        found.append(mine)
        found.append(gather_for_metrics(mine, use_gather_object=True))
    with state.split_between_processes(torch.arange(3), apply_padding=True) as padded:
        found.append(padded.tolist())
        found.append(gather_for_metrics(padded).tolist())
    return found


@pytest.mark.parametrize(("world_size", "group_size"), [(4, 2), (2, 2)])
def test_processes_that_see_the_same_batches_count_as_one(world_size: int, group_size: int) -> None:
    expected = run_on_ranks(world_size // group_size, evaluate_in_groups, 1)
    for rank, found in enumerate(run_on_ranks(world_size, evaluate_in_groups, group_size)):
        assert found == expected[rank // group_size]


def evaluate_after_groups() -> list[Any]:
    share_batches(2)
    found: list[Any] = [gather(torch.tensor([1])).tolist(), reduce(torch.tensor([1]), "sum").tolist()]
    found.append(evaluate(make_loader(5, 2, False, False))[0])  # a strategy of Lightning's is next
    share_batches(1)
    found.append(gather_for_metrics(torch.tensor([1])).tolist())
    return found


def test_groups_are_those_of_the_loader_and_of_the_last_strategy() -> None:
    for found in run_on_ranks(2, evaluate_after_groups):
        assert found == [[1, 1], [2], list(range(5)), [1, 1]]


class AccelerateLoader:
    """Whole batches dealt in turn, the last global batch filled up from the start, and Accelerate's ``remainder``."""

    def __init__(self, length: int, batch_size: int) -> None:
        state = PartialState()
        self.total_batch_size = batch_size * state.num_processes
        self.length, self.batch_size, self.index = length, batch_size, state.process_index
        self.remainder = length % self.total_batch_size
        self.end_of_dataloader = False

    def __iter__(self) -> Any:
        for begin in range(0, self.length, self.total_batch_size):
            self.end_of_dataloader = begin + self.total_batch_size >= self.length
            mine = range(begin + self.index * self.batch_size, begin + (self.index + 1) * self.batch_size)
            yield (torch.tensor([index % self.length for index in mine]),)


def evaluate_contiguous() -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    found = {}
    for length in range(1, 21):
        for batch_size in range(1, 6):
            loader, state = AccelerateLoader(length, batch_size), GradientState()
            state._add_dataloader(loader)
            samples = [sample for (batch,) in loader for sample in gather_for_metrics(batch).tolist()]
            found[length, batch_size] = samples, [state.remainder, loader.total_batch_size]
            state._remove_dataloader(loader)
    return found


@WORLD_SIZES
def test_contiguous_layouts_with_accelerates_attributes(world_size: int) -> None:
    for results in run_on_ranks(world_size, evaluate_contiguous):
        for (length, _), (samples, (remainder, total_batch_size)) in results.items():
            assert samples == list(range(length))
            assert remainder == -length % total_batch_size


def evaluate_told() -> list[Any]:
    state, rank, size = GradientState(), PartialState().process_index, PartialState().num_processes
    loader = object.__new__(AccelerateLoader)  # carries nothing: only what the driver tells
    state._add_dataloader(loader, remainder=1)
    batch = torch.arange(2) + 2 * rank
    found: list[Any] = [gather_for_metrics(batch).tolist()]
    state._set_end_of_dataloader(loader, True)
    found += [gather_for_metrics(batch).tolist(), gather_for_metrics(torch.tensor([[1.0]]).expand(2, 1)).shape]
    state._set_end_of_dataloader(loader, True, cut_short=True)  # a limit: the padding lies in a batch that never comes
    assert state.end_of_dataloader
    assert gather_for_metrics(batch).tolist() == list(range(2 * size))
    state._remove_dataloader(loader)
    found += [gather_for_metrics(batch).tolist(), gather_for_metrics(input_data=[batch], use_gather_object=True)]
    assert found[0] == found[3] == list(range(2 * size))
    return found


@WORLD_SIZES
def test_a_driver_tells_the_remainder_and_without_a_loader_it_is_gather(world_size: int) -> None:
    for found in run_on_ranks(world_size, evaluate_told):
        assert found[1] == list(range(2 * world_size - 1))
        assert found[2] == (2 * world_size - 1, 1)
        assert [len(block) for block in found[4]] == [2] * world_size


class Stream(IterableDataset[tuple[torch.Tensor]]):
    def __iter__(self) -> Any:
        return iter([(torch.tensor(n),) for n in range(4)])


def evaluate_unknown() -> list[Any]:
    state, found = GradientState(), []
    data = TensorDataset(torch.arange(4))
    for loader in (
        DataLoader(Stream(), batch_size=4),
        DataLoader(data, batch_size=None),
        DataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_replicas=1, rank=0, shuffle=False)),
        DataLoader(data, batch_size=4),
        DataLoader(data, batch_size=4, shuffle=True),
        [(torch.arange(4),)],
    ):
        for (batch,) in state.track(loader):
            found.append((state.remainder, len(gather_for_metrics(batch.reshape(-1)))))
    return found


def test_samplers_that_tell_nothing_leave_the_remainder_unknown_and_drop_nothing() -> None:
    for found in run_on_ranks(2, evaluate_unknown):
        remainders = [remainder for remainder, _ in found]
        assert remainders == [-1, *[-1] * 4, -1, 0, 0, -1]
        assert {count for remainder, count in found if count != 2} == {8}


def gather_before_any_state() -> list[int]:
    assert not dist.is_initialized()
    return gather(torch.tensor([1])).tolist()


def test_gathering_needs_no_state_made_before() -> None:
    assert run_on_ranks(2, gather_before_any_state, init_group=False) == [[1, 1], [1, 1]]
