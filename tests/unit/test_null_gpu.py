"""The null GPU of scripts/null_gpu, by ctypes, from processes that share it: memory, its end, and
collectives."""

import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from null_gpu_process import AVERAGE, MAXIMUM, MINIMUM, PRODUCT, SUM, TYPES, GpuProcess

from scripts import gpu_rehearsal
from scripts.null_gpu import waits
from scripts.null_gpu.build import build

SIZE = 1_000_000
OUT_OF_MEMORY, NOT_INITIALIZED, INVALID_KERNEL, INVALID_DEVICE, MAPPING_FAILED = 2, 3, 98, 101, 205
ALREADY_REGISTERED = 712
INVALID_USAGE, REMOTE_ERROR = 5, 6
Start = Callable[..., GpuProcess]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("gcc"):
        pytest.skip("the null GPU is C, and there is no gcc here")
    return build(tmp_path_factory.mktemp("null_gpu"))


@pytest.fixture
def start(library: Path) -> Iterator[Start]:
    """Starts processes that share two devices of SIZE bytes, which no other test sees."""
    name = f"test_{uuid.uuid4().hex}"
    processes: list[GpuProcess] = []

    def new(**settings: str) -> GpuProcess:
        shared = {
            "NULL_GPU_NAME": name,
            "NULL_GPU_COUNT": "2",
            "NULL_GPU_BYTES": str(SIZE),
            "NULL_GPU_DEADLINE": "30",
        }
        processes.append(GpuProcess(library, **(shared | settings)))
        return processes[-1]

    yield new
    for process in processes:
        process.kill()
    for file in Path("/dev/shm").glob(f"null_gpu.{name}.*"):
        file.unlink()


def together(processes: list[GpuProcess], name: str, arguments: list[tuple]) -> list:
    """The same call in all processes at once, each with its arguments."""
    for process, own in zip(processes, arguments, strict=True):
        process.start(name, *own)
    return [process.result() for process in processes]


def joined(start: Start, num_ranks: int, **settings: str) -> list[GpuProcess]:
    ranks = [start(**settings) for _ in range(num_ranks)]
    name = ranks[0].call("unique_id")
    assert (
        together(ranks, "join", [(name, num_ranks, rank) for rank in range(num_ranks)])
        == [0] * num_ranks
    )
    return ranks


def test_two_processes_see_each_others_bytes_and_those_of_a_killed_one_are_free(start: Start):
    first, second = start(), start()
    assert (first.call("malloc", 300_000), second.call("malloc", 200_000)) == (0, 0)
    assert [process.call("used", 0) for process in (first, second)] == [500_000, 500_000]
    first.kill()
    assert second.call("used", 0) == 200_000
    assert (second.call("free"), second.call("used", 0)) == (0, 0)


def test_the_most_that_was_held_of_a_device_is_known_until_it_is_asked_for(start: Start):
    first, second = start(), start()
    assert (first.call("malloc", 300_000), second.call("malloc", 200_000)) == (0, 0)
    assert (second.call("free"), first.call("malloc", 100_000)) == (0, 0)
    assert [second.call("most", device) for device in (0, 1)] == [500_000, 0]
    assert first.call("most", 0) == 400_000  # what is held since
    name = first.settings["NULL_GPU_NAME"]
    second.call("malloc", 500_000)
    assert gpu_rehearsal.most_held(Path(f"/dev/shm/null_gpu.{name}.0")) == 900_000


def test_pinned_memory_is_counted_from_cuda_and_of_the_process(start: Start):
    assert start().call("pinned_while") == [0, 300, 500, 300]


def test_a_process_that_sees_device_1_alone_counts_on_device_1(start: Start):
    alone = start(CUDA_VISIBLE_DEVICES="1")
    assert alone.call("malloc", 300_000) == 0
    assert [alone.call("used", device) for device in (0, 1)] == [0, 300_000]
    # Which shows all devices
    assert [alone.call("nvml_used", device) for device in (0, 1)] == [0, 300_000]
    assert alone.call("set_device", 1) == INVALID_DEVICE  # its device 0 is the only one


def test_an_allocation_beyond_the_size_fails_and_takes_nothing(start: Start):
    first, second = start(), start()
    assert (first.call("malloc", 600_000), second.call("malloc", 400_001)) == (0, OUT_OF_MEMORY)
    assert second.call("used", 0) == 600_000
    assert second.call("malloc", 400_000) == 0


def test_a_process_that_was_forked_after_the_first_use_has_no_device(start: Start):
    process = start()
    assert process.call("malloc", 1) == 0
    assert process.call("malloc_in_a_fork") == NOT_INITIALIZED


def test_virtual_memory_counts_while_it_is_mapped_and_no_more_than_there_is(start: Start):
    process = start()
    assert process.call("reserve_and_map", 600_000) == (0, 600_000)
    assert process.call("unmap", 600_000) == 0
    assert process.call("reserve_and_map", SIZE + 1) == (OUT_OF_MEMORY, 0)


def test_memory_that_is_still_registered_is_not_registered_again(start: Start):
    assert start().call("register_overlapping") == [0, ALREADY_REGISTERED, 0, 0]


def test_a_process_reads_and_writes_memory_that_another_exported_and_counts_it_once(start: Start):
    owner, guest = start(), start()
    handle = owner.call("export", b"weights")
    assert guest.call("write_into", handle, b"version") == (0, b"weights")
    assert owner.call("read", 7) == b"version"
    assert guest.call("used", 0) == 7
    owner.kill()
    assert guest.call("write_into", handle, b"version")[0] == MAPPING_FAILED


def test_synchronisations_and_copies_that_wait_are_counted(start: Start):
    process = start()
    process.call("copies")
    counted = {
        name: process.call("count", name) for name in ("copies", "blocking_copies", "copied_bytes")
    }
    # Pageable, and cudaMemcpy
    assert counted == {"copies": 3, "blocking_copies": 2, "copied_bytes": 24}
    assert [
        process.call("count", f"{what}_synchronizes") for what in ("stream", "event", "device")
    ] == [1, 1, 0]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_collectives_give_what_the_ranks_put_in(start: Start, num_ranks: int):
    """Rank r has 1 + r, 2 + r, ... so that the sum of n ranks is n times the first plus 0 + 1 + ...
    + (n - 1)."""
    ranks = joined(start, num_ranks)
    rest = {2: 1, 3: 3}[num_ranks]

    def run(
        function: str, dtype: str, num_in: int, num_out: int, count: int, *numbers: int
    ) -> list[list[float]]:
        inputs = [
            [float(1 + i + rank) if "float" in dtype else 1 + i + rank for i in range(num_in)]
            for rank in range(num_ranks)
        ]
        arguments = [(function, dtype, values, num_out, count, *numbers) for values in inputs]
        answers = together(ranks, "collective", arguments)
        assert [error for error, _ in answers] == [0] * num_ranks, answers
        return [values for _, values in answers]

    for dtype in TYPES:
        sums = [num_ranks * (1 + i) + rest for i in range(2 * num_ranks)]
        assert run("ncclAllReduce", dtype, 3, 3, 3, SUM) == [sums[:3]] * num_ranks
        assert (
            run("ncclAllReduce", dtype, 3, 3, 3, MAXIMUM)
            == [[num_ranks, num_ranks + 1, num_ranks + 2]] * num_ranks
        )
        assert run("ncclAllReduce", dtype, 3, 3, 3, MINIMUM) == [[1, 2, 3]] * num_ranks
        assert (
            run("ncclAllReduce", dtype, 2, 2, 2, PRODUCT)
            == [[2, 6] if num_ranks == 2 else [6, 24]] * num_ranks
        )
        assert (
            run("ncclAllGather", dtype, 2, 2 * num_ranks, 2)
            == [[1, 2, 2, 3, 3, 4][: 2 * num_ranks]] * num_ranks
        )
        parts = run("ncclReduceScatter", dtype, 2 * num_ranks, 2, 2, SUM)
        assert parts == [sums[2 * rank : 2 * rank + 2] for rank in range(num_ranks)]
        assert (
            run("ncclBroadcast", dtype, 2, 2, 2, num_ranks - 1)
            == [[num_ranks, num_ranks + 1]] * num_ranks
        )
        exchanged = run("ncclAlltoAll", dtype, num_ranks, num_ranks, 1)
        assert exchanged == [
            [1 + rank + other for other in range(num_ranks)] for rank in range(num_ranks)
        ]
    assert (
        run("ncclAllReduce", "float32", 2, 2, 2, AVERAGE)
        == [[1.5, 2.5] if num_ranks == 2 else [2, 3]] * num_ranks
    )


def test_a_sum_is_added_in_float32_and_rounded_once(start: Start):
    """256 + 1 in bfloat16 is 256 again, so that a sum which rounds after each rank gives 256, not
    258."""
    ranks = joined(start, 3)
    arguments = [("ncclAllReduce", "bfloat16", [value], 1, 1, SUM) for value in (256.0, 1.0, 1.0)]
    assert together(ranks, "collective", arguments) == [(0, [258.0])] * 3


def test_a_factor_is_applied_before_the_sum(start: Start):
    ranks = joined(start, 2)
    assert (
        together(ranks, "scaled_sum", [([1.0, 2.0], 0.5), ([3.0, 5.0], 0.5)])
        == [(0, [2.0, 3.5])] * 2
    )


def test_a_collective_larger_than_its_buffer_arrives_whole(start: Start):
    ranks = joined(start, 2)
    count = 300_000  # of 4 bytes: more than one chunk of 1 MiB
    arguments = [
        ("ncclAllReduce", "int32", [rank + 1] * (count - 1) + [10 * rank], count, count, SUM)
        for rank in (0, 1)
    ]
    for error, values in together(ranks, "collective", arguments):
        assert error == 0 and set(values[:-1]) == {3} and values[-1] == 10
    halves = [
        ("ncclReduceScatter", "int32", list(range(2 * count)), count, count, SUM) for _ in (0, 1)
    ]
    for rank, (_, values) in enumerate(together(ranks, "collective", halves)):
        assert values == [2 * (rank * count + i) for i in range(count)]


def test_each_rank_of_a_ring_sends_and_receives_at_once(start: Start):
    ranks = joined(start, 3)
    # More than one chunk of 64 KiB
    messages = [bytes([65 + rank]) * (100_000 + rank) for rank in range(3)]
    arguments = [
        (messages[rank], (rank + 1) % 3, (rank - 1) % 3, 100_000 + (rank - 1) % 3)
        for rank in range(3)
    ]
    assert together(ranks, "exchange", arguments) == [
        (0, messages[(rank - 1) % 3]) for rank in range(3)
    ]


def test_ranks_of_one_color_are_a_communicator_in_the_order_of_their_keys(start: Start):
    ranks = joined(start, 3)
    assert together(ranks, "split", [(7, 2), (8, 0), (7, 1)]) == [(0, 2, 1), (0, 1, 0), (0, 2, 0)]
    arguments = [("ncclAllGather", "int32", [10 * rank], 2, 1) for rank in (0, 2)]
    assert together([ranks[0], ranks[2]], "collective", arguments) == [(0, [20, 0])] * 2


def test_a_rank_that_is_killed_ends_the_collective_of_the_others(start: Start):
    ranks = joined(start, 3, NULL_GPU_DEADLINE="1000")
    ranks[1].kill()
    arguments = [("ncclAllReduce", "int32", [1], 1, 1, SUM)] * 2
    for error, text in together([ranks[0], ranks[2]], "collective", arguments):
        assert error == REMOTE_ERROR
        assert "rank 1 (process" in text or "another rank has failed" in text


def test_a_rank_that_does_not_come_ends_the_collective_at_the_deadline(start: Start):
    ranks = joined(start, 2, NULL_GPU_DEADLINE="1")
    error, text = ranks[0].call("collective", "ncclAllReduce", "int32", [1], 1, 1, SUM)
    assert (error, text) == (
        REMOTE_ERROR,
        "rank 1 did not come to the all-reduce within 1 s (NULL_GPU_DEADLINE)",
    )


def test_ranks_in_different_collectives_are_told_so(start: Start):
    ranks = joined(start, 2)
    calls = [("ncclAllReduce", "int32", [1], 1, 1, SUM), ("ncclAllGather", "int32", [1], 2, 1)]
    (error, text), (other_error, _) = together(ranks, "collective", calls)
    assert (error, other_error) == (INVALID_USAGE, INVALID_USAGE)
    assert text == "all-reduce of 1 elements of type 2, while rank 1 does all-gather of 1 of type 2"


def test_a_kernel_that_nothing_answers_is_an_error_where_numbers_count_and_is_written_to_the_log(
    start: Start, tmp_path: Path
):
    log = tmp_path / "null_gpu.log"
    assert start(NULL_GPU_LOG=str(log)).call("launch", b"silu") == 0
    assert not log.exists()
    assert (
        start(NULL_GPU_LOG=str(log), NULL_GPU_NUMBERS="1").call("launch", b"silu") == INVALID_KERNEL
    )
    assert (
        log.read_text()
        == "null GPU: the kernel silu was launched, which nothing answers with numbers.\n"
    )


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="install gcc"):
        build(tmp_path)


def test_the_known_waits_are_within_their_bound_and_a_new_place_or_one_wait_more_is_a_fault():
    known = json.loads(waits.COMMITTED.read_text())
    assert list(known) == [scenario.name for scenario in waits.SCENARIOS]
    assert not [
        fault for name, counted in known.items() for fault in waits.faults_of(name, counted, known)
    ]
    counted = {
        "waits": 11,
        "micro_batches": 4,
        "optimizer_steps": 2,
        "places": {"critic.py:_predict: aten.nonzero": 1},
    }
    counted["by_torch"] = {"throughput.py: torch.cuda.synchronize()": 1}
    assert waits.faults_of("critic", counted, known) == [
        "critic: 11 waits, at most 10",
        "critic: waits in a new place, critic.py:_predict: aten.nonzero",
        "critic: waits in a new place, throughput.py: torch.cuda.synchronize()",
    ]
