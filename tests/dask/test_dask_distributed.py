"""Attention on distributed's workers: the same bits, also when one dies; errors that say where."""

import os
import signal
import time
from unittest import mock

import dask
import dask.array as da
import numpy as np
import pytest
from dask_workers import Counted, cripple, greedy
from distributed import Client, LocalCluster, wait
from distributed.scheduler import KilledWorker

import mha
import mha.dask

pytestmark = pytest.mark.thorough

SETTINGS = {"distributed.scheduler.allowed-failures": 1, "distributed.admin.log-length": 0}


@pytest.fixture
def client():
    """Two worker processes of one thread each."""
    with (mock.patch.dict(os.environ),  # where nannies leave what their workers shall find
          dask.config.set(SETTINGS),
          LocalCluster(n_workers=2, threads_per_worker=1, memory_limit="600MB",
                       dashboard_address=None, silence_logs=50) as cluster,
          Client(cluster) as of_cluster):
        yield of_cluster


def random_array(*shape, chunks):
    return da.from_array(np.random.default_rng(0).standard_normal(shape).astype(np.float32),
                         chunks=chunks)


def test_the_same_bits_on_workers_and_each_has_its_share_of_cores(client):
    x = random_array(2, 4, 300, 16, chunks=(1, 2, 50, 16))
    output, pullback = mha.dask.scaled_dot_product_attention_vjp(x, x, x, causal=True, dropout=0.2,
                                                                 rng=1)
    wanted = output, *pullback(x)[:3]
    alone = dask.compute(*wanted, scheduler="sync")
    for ours, others in zip(dask.compute(*wanted), alone, strict=True):
        assert np.array_equal(ours, others)
    layer = mha.dask.MultiHeadAttention(mha.MultiHeadAttention(16, 2, rotary=mha.Rotary(8), rng=0))
    rows = random_array(2, 100, 16, chunks=(1, 30, 16))
    assert np.array_equal(layer(rows).compute(), layer(rows).compute(scheduler="sync"))
    # The nanny gives each worker's process OMP_NUM_THREADS=1, and the pool heeds it.
    shares = client.map(lambda _: mha.dask._tasks.share_of_cores(), range(4), pure=False)
    assert client.gather(shares) == [1] * 4


def test_threads_of_a_worker_share_its_cores():
    with (LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None,
                       silence_logs=50) as cluster, Client(cluster) as client):
        with mha.threads(1):
            before = mha.get_num_threads()
        mha.set_num_threads(6)
        try:
            assert client.submit(mha.dask._tasks.share_of_cores).result() == 3
        finally:
            mha.set_num_threads(len(os.sched_getaffinity(0)))
        assert before == 1


def test_parameters_come_to_each_worker_once_and_packed(client, tmp_path):
    layer = Counted(16, 2, rng=0)
    layer.folder = str(tmp_path)
    x = random_array(4, 400, 16, chunks=(1, 20, 16))
    got = mha.dask.MultiHeadAttention(layer)(x, causal=True).compute()
    wanted = mha.MultiHeadAttention(16, 2, rng=0)(x.compute(scheduler="sync"), causal=True)
    assert np.abs(got - wanted).max() < 1e-6
    workers = set(client.run(os.getpid).values())
    by_process = [int(path.name.split("-")[0]) for path in tmp_path.iterdir()]
    assert {process: by_process.count(process) for process in workers} == dict.fromkeys(workers, 1)


def finished_tasks(dask_scheduler):
    return sum(task.state in ("memory", "released") and task.run_spec is not None
               for task in dask_scheduler.tasks.values() if "mha-" in str(task.key))


def test_a_worker_that_is_killed_midway(client):
    """What it had is computed again by the others: the same bits."""
    x = random_array(1, 2, 4000, 32, chunks=(1, 1, 250, 32))
    output, pullback = mha.dask.scaled_dot_product_attention_vjp(x, x, x)
    wanted = [output, *pullback(x)[:3]]
    pids = client.run(os.getpid)
    futures = client.compute(wanted)
    while client.run_on_scheduler(finished_tasks) < 300:
        time.sleep(0.01)
    os.kill(next(iter(pids.values())), signal.SIGKILL)
    assert not all(future.done() for future in futures)
    wait(futures)
    for ours, others in zip(client.gather(futures), dask.compute(*wanted, scheduler="threads"),
                            strict=True):
        assert np.array_equal(ours, others)


def test_a_worker_that_runs_out_of_memory(client):
    """Its nanny ends it, and the next one; the error names the chunk."""
    x = random_array(1, 2, 40, 8, chunks=(1, 1, 20, 8))
    hungry = x.map_blocks(greedy, dtype=x.dtype)
    with pytest.raises(KilledWorker, match=r"greedy.*, 0, [01], [01], 0\)"):
        mha.dask.scaled_dot_product_attention(x, hungry, hungry).compute()


def test_a_part_that_finds_no_memory_says_which_it_is(client):
    x = random_array(1, 2, 40, 8, chunks=(1, 1, 20, 8))
    client.run(cripple)
    with pytest.raises(MemoryError, match="workspace") as error:
        mha.dask.scaled_dot_product_attention(x, x, x, causal=True).compute()
    assert any("attention: batch 0, head" in note for note in error.value.__notes__)


def test_a_chunk_that_cannot_be_read_is_the_error_itself(client):
    def unreadable(chunk, block_info=None):
        if block_info[0]["chunk-location"] == (0, 1, 1, 0):
            raise OSError("disk on fire")
        return chunk

    x = random_array(1, 2, 40, 8, chunks=(1, 1, 20, 8))
    with pytest.raises(OSError, match="disk on fire"):
        mha.dask.scaled_dot_product_attention(
            x, x.map_blocks(unreadable, dtype=x.dtype), x).compute()
